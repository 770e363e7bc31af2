"""The other side of each comparison: who it is, what it is asked, and which weights answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from comlrl_ds.config.errors import ConfigError, Findings, Problem
from comlrl_ds.config.iterative import MADPOIterConfig
from comlrl_ds.config.run_file import RolloutConfig
from comlrl_ds.preference.api_formats import Answer, APIRequest
from comlrl_ds.preference.centralized import joint_prompt
from comlrl_ds.preference.collection import SampledItem
from comlrl_ds.preference.prompts import JointPrompt, PromptBuilder, formatted, plain_text
from comlrl_ds.preference.teams import AgentTokens, JointTeam, Team
from comlrl_ds.rollout.base import PolicyWeights
from comlrl_ds.rollout.start import length_limit
from comlrl_ds.trainers.preference.team import TeamSetup


def comparator_name(writer: int) -> str:
    """Name of a comparator's policy."""
    return f"comparator_{writer}"


@dataclass
class Comparator:
    """A comparator that has been checked; it holds no model.

    Attributes:
        args: the settings. setup: the agents'. team: the comparator's writers.
        sources: model folder of each writer that has one of its own; empty: the agents' weights, or an API.
        builder: makes its prompts; None: they are the agents'.
    """

    args: MADPOIterConfig
    setup: TeamSetup
    team: Team
    sources: list[str] = field(default_factory=list)
    builder: PromptBuilder | None = None

    @property
    def remote(self) -> bool:
        return self.args.comparator_policy == "api"

    @property
    def parse_failures(self) -> int:
        """Joint answers without any section, so far."""
        return self.team.failures[0] if isinstance(self.team, JointTeam) else 0

    def prompts(self, dataset: Sequence[Any], joints: Sequence[JointPrompt]) -> list[JointPrompt]:
        """Its prompts of the agents' tasks; over-long ones are dropped, cut or refused as the agents' are."""
        if self.builder is None:
            return list(joints)
        return self.builder.build_some(dataset, [j.index for j in joints])

    def agent_of(self, writer: int) -> int:
        """The agent whose weights a writer has, where they are an agent's."""
        return self.args.comparator_centralized_agent_index if self.args.compares_centralized else writer

    def policies(self, weights: Mapping[int, PolicyWeights]) -> dict[str, PolicyWeights]:
        """Weights by name of the comparator's policies.

        Args:
            weights: of each agent, where the comparator has no models of its own.
        """
        if self.sources:
            return {(n := comparator_name(k)): PolicyWeights(n, s, s) for k, s in enumerate(self.sources)}
        writers = range(self.team.size)
        return {(n := comparator_name(k)): replace(weights[self.agent_of(k)], name=n) for k in writers}

    def in_agents_tokens(self, item: SampledItem, joint: JointPrompt) -> SampledItem:
        """A sampled task as the agents would have written it, under their prompts."""
        if item.converted is None:
            return replace(item, joint=joint)
        written = item.written if self.args.centralized else item.texts
        return replace(item, joint=joint, completions=item.converted, written=written)

    # --- behind HTTP
    def requests(self, joints: Sequence[JointPrompt]) -> list[APIRequest]:
        """What is asked for: a request per task and agent, or one per task where one writes every role."""
        args, found = self.args, []
        for joint in joints:
            contents = [formatted(f, joint.item, f"task {joint.index}, agent {i}") for i, f in enumerate(self.setup.formatters)]
            agents = range(len(contents))
            if args.compares_centralized:
                text = joint_prompt(self.setup.adapter, joint.item, list(map(plain_text, contents)), f"task {joint.index}")
                contents, agents = [text], [args.comparator_centralized_agent_index]  # type: ignore[assignment]
            found += [
                APIRequest(joint.index, joint.item, agent, content, args.comparator_candidates, limit)
                for agent, content, limit in zip(agents, contents, self.team.token_limits)
            ]
        return found

    def answered(self, joint: JointPrompt, answers: Sequence[Sequence[Answer | None]]) -> SampledItem:
        """A task of which every request has ended.

        Args:
            answers: [writer][candidate]; None where there is none.
        """
        item = SampledItem(joint, [], stream="comparator")
        lost = {j for row in answers for j, answer in enumerate(row) if answer is None}
        written = [[answer.text if answer else "" for answer in row] for row in answers]
        finished = [[answer is None or answer.finished for answer in row] for row in answers]
        item.take(self.team.read_texts(joint, written, finished, lost))
        return item


def set_up_comparator(args: MADPOIterConfig, setup: TeamSetup, rollout: RolloutConfig, folders: Sequence[str]) -> Comparator:
    """Checks and loads what is light.

    Args:
        folders: model folder of each comparator of the policy "model", else empty.

    Raises:
        ConfigError: with every problem.
    """
    found, team = Findings(), setup.team
    limits = joint_limits(args)
    writers = 1 if args.compares_centralized else args.num_agents
    names = [comparator_name(k) for k in range(writers)]
    tokens = AgentTokens(team.tokenizers, team.token_limits, team.stop_ids)
    if args.comparator_policy == "api":
        found.of(args.api.check_credential)
        found.raise_any()
        if args.compares_centralized:
            joint = JointTeam(
                [None], limits, [()], names, tokens, roles=args.num_agents, adapter=setup.adapter, whole=args.centralized
            )
            return Comparator(args, setup, joint)
        return Comparator(args, setup, Team([None] * writers, limits, [()] * writers, agents=tokens))
    if args.comparator_policy == "model":
        tokenizers, stops = _read_models(folders, found)
        sources = list(folders)
    else:
        k = args.comparator_centralized_agent_index
        chosen = [k] if args.compares_centralized else range(writers)
        tokenizers, stops = [team.tokenizers[i] for i in chosen], [team.stop_ids[i] for i in chosen]
        sources = [setup.sources[i] for i in chosen]
    rooms = [length_limit(rollout, source) for source in sources]
    for room, new in zip(rooms, limits):
        if message := room.no_room(new, "comparator"):
            found.add("max_new_tokens", message)
    found.raise_any()
    prompt_limits = [room.tokens - new for room, new in zip(rooms, limits)]
    more = [room.more for room in rooms]
    own = sources if args.comparator_policy == "model" else []
    if args.compares_centralized:
        # Of an actor that writes every role itself the form has to be learned, of any other it is asked.
        same = args.centralized and _same_tokens(tokenizers[0], team.tokenizers[0]) and _same_ends(stops, team.stop_ids)
        writer = JointTeam(
            tokenizers, limits, stops, names, None if same else tokens, roles=args.num_agents, adapter=setup.adapter,
            whole=args.centralized,
        )  # fmt: skip
        if args.centralized and not own:
            writer = replace(writer, keep_unparsed=True)
            return Comparator(args, setup, writer, own)
        return Comparator(
            args, setup, writer, own, setup.joint_builder(tokenizers[0], prompt_limits[0], more, "the comparator")
        )
    if not own:
        return Comparator(args, setup, Team(tokenizers, limits, stops, names))
    called = [f"comparator {k}" for k in range(writers)]
    builder = PromptBuilder(tokenizers, setup.formatters, prompt_limits, args.overlong_prompt, more, called)
    same = all(_same_tokens(a, b) for a, b in zip(tokenizers, team.tokenizers)) and _same_ends(stops, team.stop_ids)
    return Comparator(args, setup, Team(tokenizers, limits, stops, names, None if same else tokens), own, builder)


def joint_limits(args: MADPOIterConfig) -> list[int]:
    """Longest answer of each writer: of one that writes every role the sum of limits that differ by agent."""
    if not args.compares_centralized:
        return args.token_limits
    limit = args.max_new_tokens
    return [sum(limit) if isinstance(limit, list) else limit]


def comparator_models(args: MADPOIterConfig) -> list[Any]:
    """Sources or model objects of the policy "model", one per writer; else empty."""
    if args.comparator_policy != "model":
        return []
    listed = args.comparator_agents
    if listed is None:
        return [args.comparator_model_name] * (1 if args.compares_centralized else args.num_agents)
    if args.compares_centralized:
        return [listed[args.comparator_centralized_agent_index if len(listed) > 1 else 0]]
    return list(listed)


def _read_models(folders: Sequence[str], found: Findings) -> tuple[list[Any], list[tuple[int, ...]]]:
    from comlrl_ds.engines.loading import load_tokenizer, stop_ids

    loaded = {f: found.of(partial(load_tokenizer, f, "comparator_agents")) for f in dict.fromkeys(folders)}
    found.raise_any()
    return [loaded[f] for f in folders], [stop_ids(f, loaded[f]) for f in folders]


def _same_ends(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> bool:
    """Whether the same tokens end the answers of both, writer by writer."""
    return [set(ids) for ids in ours] == [set(ids) for ids in theirs]


def _same_tokens(one: Any, other: Any) -> bool:
    """Whether two tokenizers give every text the same ids, as far as their files tell."""
    if one is other:
        return True
    files = [getattr(getattr(t, "backend_tokenizer", None), "to_str", None) for t in (one, other)]
    if None in files or one.eos_token_id != other.eos_token_id:
        return False
    return files[0]() == files[1]()  # type: ignore[misc]


def check_agents_prompts(comparator: Comparator, dataset: Sequence[Any]) -> None:
    """Makes the first task's request, so that an adapter that cannot work ends the run here.

    Raises:
        ConfigError: it cannot.
    """
    if not len(dataset):
        return
    joint = JointPrompt(0, dataset[0], ())
    if comparator.remote:
        first = comparator.requests([joint])
        missing = [n for n in comparator.args.comparator_api_item_fields or () if n not in first[0].item]
        if missing:
            raise ConfigError(Problem("comparator_api_item_fields", f"task 0 has no field {missing[0]!r}"))
    elif comparator.builder is not None:
        comparator.builder.build(dataset, [0])
