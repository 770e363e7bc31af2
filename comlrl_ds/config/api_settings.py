"""Settings of a comparator behind HTTP, and the keys that no file, log or message may show."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, quote, urlsplit

import httpx

from comlrl_ds.config.errors import Findings, nearest

# Format: the URL that its inventor serves it at.
FORMATS = {
    "generic": "",
    "openai": "https://api.openai.com/v1/chat/completions",
    "anthropic": "https://api.anthropic.com/v1/messages",
    "openai_responses": "https://api.openai.com/v1/responses",
}
ALIASES = {
    "openai_chat": "openai", "chat": "openai", "anthropic_messages": "anthropic", "messages": "anthropic",
    "responses": "openai_responses", "codex": "openai_responses",
}  # fmt: skip

HIDDEN = "***"
SHORTEST_SECRET = 8


class Secret:
    """A text that no repr, str, copy or pickle shows; `reveal` gives it.

    What is pickled is an empty secret: a checkpoint or another process that gets one holds nothing (pydantic's SecretStr
    is pickled in clear text).
    """

    __slots__ = ("_text",)

    def __init__(self, text: str | None = None) -> None:
        self._text = text

    def reveal(self) -> str:
        """The text.

        Raises:
            RuntimeError: it was pickled on the way.
        """
        if self._text is None:
            raise RuntimeError("this secret was left out of a file or message; read it from the environment again")
        return self._text

    def __repr__(self) -> str:
        return f"Secret({HIDDEN})"

    def __copy__(self) -> Secret:
        return self

    def __deepcopy__(self, memo: Any) -> Secret:
        return self

    def __reduce__(self) -> tuple[type[Secret], tuple[()]]:
        return Secret, ()


class Scrubber:
    """Takes secrets out of texts that others wrote: servers echo what they were sent."""

    def __init__(self, secrets: Iterable[str]) -> None:
        forms = {form for s in secrets if s for form in (s, json.dumps(s)[1:-1], quote(s, safe=""), quote(s))}
        longest_first = sorted(map(re.escape, forms), key=len, reverse=True)
        self._pattern = re.compile("|".join(longest_first), re.IGNORECASE) if forms else None

    def __call__(self, text: str) -> str:
        return self._pattern.sub(HIDDEN, text) if self._pattern else text


@dataclass(frozen=True)
class APISettings:
    """The settings `comparator_api_*` of an iterative trainer, without that prefix.

    Attributes:
        url: where requests are posted; required.
        format: "generic", "openai", "anthropic", "openai_responses", or an alias of theirs.
        model: sent as `model`; the three vendor formats need it.
        max_n_per_request: openai: answers asked for in one request; None: 1 for DeepSeek, else all of a prompt.
        timeout: longest wait in seconds for one whole answer.
        headers: sent with each request; the key's header wins over them.
        key: the key itself; wins over `key_env`.
        key_env: environment variable that holds the key.
        key_header, key_prefix: the key is sent as "<key_header>: <key_prefix> <key>"; no prefix: the bare key.
        response_field: dotted path of the answers in an answer of the generic format.
        extra_body: merged over the body; None removes a field of the vendor formats.
        item_fields: the task's fields that the generic format sends; None: all (addition).
        concurrency: requests at a time (addition).
        max_retries: further tries of a request that a fault of server or network ended (addition).
        backoff: wait in seconds before the first of them, doubled each time (addition).
        max_wait: longest wait in seconds between two tries, whatever Retry-After says (addition).
        max_failure_fraction: share of the answers that may stay missing; more ends the run (addition).

    Raises:
        ConfigError: one line for each setting that is wrong.
    """

    url: str | None = field(default=None, repr=False)
    format: str = "generic"
    model: str | None = None
    max_n_per_request: int | None = None
    timeout: float = 120.0
    headers: Mapping[str, str] | None = field(default=None, repr=False)
    key: Secret | str | None = field(default=None, repr=False)
    key_env: str | None = None
    key_header: str = "Authorization"
    key_prefix: str | None = "Bearer"
    response_field: str = "completions"
    extra_body: Mapping[str, Any] | None = field(default=None, repr=False)
    item_fields: Sequence[str] | None = None
    concurrency: int = 16
    max_retries: int = 5
    backoff: float = 1.0
    max_wait: float = 60.0
    max_failure_fraction: float = 0.1

    def __post_init__(self) -> None:
        name = self.format.strip().lower()
        object.__setattr__(self, "format", ALIASES.get(name, name))
        if isinstance(self.key, str):
            object.__setattr__(self, "key", Secret(self.key))
        findings = Findings()
        for check in (self._check_place, self._check_key, self._check_body, self._check_numbers):
            check(findings)
        findings.raise_any()

    def check_credential(self) -> None:
        """The key is there. Apart from the other checks, as the main rank alone has it.

        Raises:
            ConfigError: the environment variable is not set, the key is empty, or no header can carry it.
        """
        findings = Findings()
        where = "comparator_api_key" if self.key is not None else "comparator_api_key_env"
        credential = self.credential()
        if credential is not None and not credential.reveal():
            findings.add(where, f"the environment variable {self.key_env!r} is not set" if self.key is None else "is empty")
        elif credential is not None and not _fits_a_header(credential.reveal()):
            findings.add(where, "the key holds characters that no header can carry (line breaks, non-ASCII letters)")
        findings.raise_any()

    def credential(self) -> Secret | None:
        """The key, or None where the endpoint needs none."""
        if isinstance(self.key, Secret):
            return Secret(self.key.reveal().strip())
        if self.key_env is None:
            return None
        return Secret(os.environ.get(self.key_env, "").strip())

    def scrubber(self) -> Scrubber:
        """For messages: removes the key and all longer values of headers and of the URL's query."""
        return Scrubber(self._secrets(re.compile("")))

    def answer_scrubber(self) -> Scrubber:
        """For answers, which an endpoint may fill with what it was sent: removes what is a credential by its name."""
        return Scrubber(s for s in self._secrets(CREDENTIAL_NAME) if len(s) >= SHORTEST_SECRET)

    def _secrets(self, names: re.Pattern[str]) -> list[str]:
        credential = self.credential()
        sent = [*(self.headers or {}).items(), *parse_qsl(urlsplit(self.url or "").query)]
        parts = [part for name, value in sent if names.search(name) for part in (value, *value.split())]
        return [credential.reveal() if credential else "", *(part for part in parts if len(part) >= SHORTEST_SECRET)]

    @property
    def place(self) -> str:
        """The URL as messages show it: without its query."""
        parts = urlsplit(self.url or "")
        return f"{parts.scheme}://{parts.netloc}{parts.path}"

    def _check_place(self, findings: Findings) -> None:
        if self.format not in FORMATS:
            wrong = nearest(self.format, [*FORMATS, *ALIASES])
            findings.add("comparator_api_format", f"unknown format {self.format!r}{wrong}")
        if not self.url:
            known = FORMATS.get(self.format)
            findings.add("comparator_api_url", f"required with comparator_policy 'api'{f', e.g. {known}' if known else ''}")
            return
        try:
            url = httpx.URL(self.url)
        except httpx.InvalidURL:
            url = httpx.URL("")
        if url.scheme not in ("http", "https") or not url.host or not 0 < (url.port or 80) < 65536:
            findings.add("comparator_api_url", "not a URL of a server; write http://host[:port]/path or https://…")
        elif url.userinfo:
            findings.add("comparator_api_url", "holds a user name or password; write it in comparator_api_key_env's variable")

    def _check_key(self, findings: Findings) -> None:
        if self.key is None and self.key_env is not None and not _VARIABLE.fullmatch(self.key_env):
            # Not shown: it may be the key itself.
            findings.add("comparator_api_key_env", "is not the name of an environment variable; write its name, not the key")
        if not _TOKEN.fullmatch(self.key_header):
            findings.add("comparator_api_key_header", f"{self.key_header!r} is not a header's name")
        if self.key_prefix is not None and not _fits_a_header(self.key_prefix):
            findings.add("comparator_api_key_prefix", f"{self.key_prefix!r} holds characters that no header can carry")
        for name, value in (self.headers or {}).items():
            if not isinstance(name, str) or not _TOKEN.fullmatch(name):
                findings.add("comparator_api_headers", f"{name!r} is not a header's name")
            elif not isinstance(value, str) or not _fits_a_header(value):
                findings.add(f"comparator_api_headers.{name}", "write a text of one line of ASCII characters")

    def _check_body(self, findings: Findings) -> None:
        extra = self.extra_body or {}
        try:
            json.dumps(dict(extra), allow_nan=False)
        except (TypeError, ValueError) as error:
            findings.add("comparator_api_extra_body", f"is not JSON: {error}")
        if self.format in FORMATS and self.format != "generic" and not self.model and "model" not in extra:
            message = f"the format {self.format!r} needs one (or comparator_api_extra_body: {{model: null}} to send none)"
            findings.add("comparator_api_model", message)
        if self.item_fields is None:
            return
        if isinstance(self.item_fields, str):
            findings.add("comparator_api_item_fields", f"write a list: [{self.item_fields}]")
        elif self.format in FORMATS and self.format != "generic":
            findings.add("comparator_api_item_fields", f"the format {self.format!r} sends no task item; leave it out")

    def _check_numbers(self, findings: Findings) -> None:
        least: dict[str, tuple[float, bool]] = {
            "max_n_per_request": (1, True), "concurrency": (1, True), "max_retries": (0, True), "timeout": (0, False),
            "backoff": (0, False), "max_wait": (0, False), "max_failure_fraction": (0, False),
        }  # fmt: skip
        for name, (low, whole) in least.items():
            value = getattr(self, name)
            if value is None and name == "max_n_per_request":
                continue
            right = isinstance(value, int if whole else int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not right or value < low or (name == "timeout" and value == 0):
                kind = f"a whole number of at least {low}" if whole else "a number above 0" if name == "timeout" else "≥ 0"
                findings.add(f"comparator_api_{name}", f"must be {kind}, got {value!r}")
            elif name == "max_failure_fraction" and value > 1:
                findings.add(f"comparator_api_{name}", f"is a share: write 0 to 1, got {value!r}")


_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
CREDENTIAL_NAME = re.compile("auth|key|token|secret|cookie|password|credential", re.IGNORECASE)
_VARIABLE = re.compile(r"[A-Za-z_]\w*")


def _fits_a_header(text: str) -> bool:
    return text.isascii() and text.isprintable()
