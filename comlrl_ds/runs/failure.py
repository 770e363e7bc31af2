"""What a run that fails leaves behind: one line for the user, and the traceback in a file that the line names."""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FILE = "error.txt"
LONGEST_LINE = 2000
_FULL = re.compile(r"No space left on device|os error 28|Disk quota exceeded", re.IGNORECASE)
# What torch's writer says when a write falls short, whatever the reason.
_SHORT_WRITE = re.compile(r"PytorchStreamWriter|inline_container|unexpected pos")
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
_FREE_ENOUGH = 1 << 20


@contextmanager
def writing(file: Path | str) -> Iterator[None]:
    """For the length of a block, errors of writing carry the file's name; libraries often leave it out.

    Raises:
        OSError: with `filename` set, in place of whatever was raised for a full or read-only disk.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(file)) from error
    except Exception as error:
        if not _disk_is_full(error, Path(file)):
            raise
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file)) from error


def _disk_is_full(error: Exception, file: Path) -> bool:
    if _FULL.search(str(error)):
        return True
    if not _SHORT_WRITE.search(str(error)):
        return False
    place = next((p for p in (file, *file.parents) if p.exists()), Path("/"))
    return shutil.disk_usage(place).free < _FREE_ENOUGH


def failure_line(error: BaseException) -> str:
    """An exception as one line that says what happened and, where that is known, what to do."""
    full = next((e for e in _chain(error) if isinstance(e, OSError) and e.errno in (errno.ENOSPC, errno.EDQUOT)), None)
    if full is not None or _FULL.search(str(error)):
        where = f": {full.filename}" if full is not None and full.filename else ""
        return f"no space left on device{where}; free some, and the same command resumes the run"
    text = without_secrets(" ".join(str(error).split()))
    line = f"{type(error).__name__}: {text}" if text else type(error).__name__
    frame = next((f for f in reversed(traceback.extract_tb(error.__traceback__)) if "comlrl_ds" in f.filename), None)
    if frame is not None and not type(error).__module__.startswith("comlrl_ds"):
        line += f" (in {Path(frame.filename).name}, line {frame.lineno})"
    return line if len(line) <= LONGEST_LINE else line[: LONGEST_LINE - 1] + "…"


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def write_traceback(error: BaseException, run_dir: Path | None) -> Path | None:
    """Writes an exception's traceback to error.txt of the run, or to a temporary file; None where neither can be written."""
    text = without_secrets("".join(traceback.format_exception(error)))
    if run_dir is not None and run_dir.is_dir():
        with suppress(OSError):
            (run_dir / FILE).write_text(text, encoding="utf-8", errors="replace")
            return run_dir / FILE
    with suppress(OSError):
        descriptor, name = tempfile.mkstemp(prefix="comlrl_ds_error_", suffix=".txt")
        with open(descriptor, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
        return Path(name)
    return None


def without_secrets(text: str) -> str:
    """A text in which the values of environment variables that hold keys are replaced by their names."""
    for name, value in os.environ.items():
        if _SECRET.search(name) and len(value) >= 8:
            text = text.replace(value, f"<{name}>")
    return text
