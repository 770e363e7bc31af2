"""MADPO in rounds: collect against a comparator, let the replay buffer select, train, repeat."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from comlrl_ds.cluster import call
from comlrl_ds.config.iterative import MADPOIterConfig
from comlrl_ds.preference.collection import COMPARATOR, TARGET, JointSampler, SampledItem, Side
from comlrl_ds.preference.distributions import (
    check_reward_range,
    distribution_content,
    distribution_metrics,
    write_distribution,
)
from comlrl_ds.preference.evaluation import win_rate_over
from comlrl_ds.preference.journal import Journal, Known
from comlrl_ds.preference.pairs import Collected, compared_pairs, mean_score
from comlrl_ds.preference.prompts import JointPrompt
from comlrl_ds.preference.records import PreferencePair
from comlrl_ds.preference.replay import draw, shares
from comlrl_ds.preference.round_files import claim_folder, free_folder
from comlrl_ds.preference.teams import agent_name
from comlrl_ds.rollout.base import PolicyWeights, Sampling
from comlrl_ds.runs.metrics import agent_metric
from comlrl_ds.runs.policies import PolicyFolders
from comlrl_ds.trainers.preference.comparator import (
    Comparator,
    check_agents_prompts,
    comparator_models,
    comparator_name,
    set_up_comparator,
)
from comlrl_ds.trainers.preference.handed_models import folders_of
from comlrl_ds.trainers.preference.madpo import MADPOTrainer
from comlrl_ds.trainers.preference.remote import ask_api
from comlrl_ds.trainers.preference.reporting import overlong_text
from comlrl_ds.trainers.preference.saving import Progress
from comlrl_ds.trainers.preference.session import policy_on_disk
from comlrl_ds.trainers.preference.team import TeamSetup


class MADPOIterTrainer(MADPOTrainer):
    """`num_iterations` rounds of MADPO. In round ν the agents' responses are compared with a comparator's at the same
    candidate index; the pairs are stored as D^(ν), the replay buffer selects B^(ν) from D^(1) … D^(ν), and every agent
    trains on it for `num_train_epochs`.

    The constructor's arguments are those of `PreferenceTrainer`.
    """

    kind: ClassVar[str] = "madpo_iter"
    config_class: ClassVar[type[MADPOIterConfig]] = MADPOIterConfig
    args: MADPOIterConfig
    comparator: Comparator
    _sides = 2

    # --- set-up
    def _check_more(self, setup: TeamSetup) -> None:
        args = self.args
        models = comparator_models(args)
        names, paths = [comparator_name(k) for k in range(len(models))], ["comparator_model_name"] * len(models)
        if args.comparator_agents is not None:
            paths = [f"comparator_agents.{k}" for k in range(len(models))]
        folders = folders_of(models, paths, names, self._copies)
        self.comparator = set_up_comparator(args, setup, self.rollout, folders)
        self._reward_range = check_reward_range(setup.oracle.reward_func) if args.log_reward_distribution else None
        if self.train_dataset is not None:
            check_agents_prompts(self.comparator, self.train_dataset)
        self._rounds: list[dict[str, Any]] = []
        self._hashes: list[int] | None = None
        self._theirs: Sequence[JointPrompt] = ()
        self._folder_hashes: dict[str, int] = {}
        self._claimed: set[Path] = set()

    def _other_policies(self) -> tuple[list[str], bool]:
        return list(self.comparator.sources), self.args.comparator_policy in ("history", "model")

    @property
    def rounds(self) -> int:
        return self.args.num_iterations

    @property
    def replay_folder(self) -> Path:
        return self._own_folder(self.args.preference_replay_dir, self.run_dir.replay)

    @property
    def policy_folders(self) -> PolicyFolders:
        """Policies of earlier rounds."""
        return PolicyFolders(self._own_folder(self.args.policy_checkpoint_dir, self.run_dir.policies))

    def _own_folder(self, wanted: str | None, default: Path) -> Path:
        """A folder that the user named, if no other run's files are in it, else a sub-folder; said once."""
        if wanted is None:
            return default
        place = Path(wanted).expanduser().absolute()
        own = free_folder(place, self.run_dir.run_id)
        if not own.exists() or own not in self._claimed:
            claim_folder(own, self.run_dir.run_id)
            self._claimed.add(own)
            if own != place:
                self.display.say(f"{place} holds an earlier run's files, which stay as they are; this run writes to {own}")
        return own

    # --- collection
    def _prompt_others(self, prompts: Sequence[JointPrompt]) -> None:
        self._theirs = prompts if self.comparator.remote else self.comparator.prompts(self.train_dataset, prompts)

    def _compare(
        self, sampler: JointSampler, prompts: Sequence[JointPrompt], sampling: Sampling, round: int, journal: Journal,
        progress: Callable[[int, int], None], known: Known,
    ) -> tuple[Collected, dict[str, float]]:  # fmt: skip
        args, comparator = self.args, self.comparator
        theirs = self._theirs
        kept = {j.index for j in theirs}
        prompts = [j for j in prompts if j.index in kept]
        target = Side(self.setup.team, self.session.policies(), prompts, args.preference_num_candidates, TARGET)
        failures = comparator.parse_failures
        values: dict[str, float] = {}
        by_oracle = not self._scores_learned
        if comparator.remote:
            with ask_api(comparator, prompts, sampling, round, journal, known) as asked:
                mine, other = sampler.sample_sides(
                    [target], sampling, round=round, journal=journal, progress=progress, known=known, answered=asked.items,
                    scored=by_oracle,
                )  # fmt: skip
            at = {item.joint.index: item for item in other}
            other = [at[j.index] for j in prompts]
            values |= asked.metrics()
        else:
            weights = self._comparator_policies(round)
            side = Side(comparator.team, weights, theirs, args.comparator_candidates, COMPARATOR)
            mine, other, _ = sampler.sample_sides(
                [target, side], sampling, round=round, journal=journal, progress=progress, known=known, scored=by_oracle
            )
            values |= self._weight_hashes(weights)
        if not by_oracle:
            self._score([*mine, *other])
        other = [comparator.in_agents_tokens(item, ours.joint) for item, ours in zip(other, mine)]
        collected = compared_pairs(
            mine, other, mode=args.pair_selection, cap=args.preference_pairs_per_sample, run_seed=self.seed, round=round,
            max_invalid_fraction=args.max_invalid_fraction,
        )  # fmt: skip
        values |= self._of_sides(collected, mine, other, round)
        values["iter/parse_failures"] = comparator.parse_failures - failures
        if (builder := comparator.builder) is not None:
            values["iter/comparator_dropped_prompts"] = len(builder.dropped)
            values["iter/comparator_truncated_prompts"] = len(builder.truncated)
        values["iter/comparator_cut"] = sum(item.cut for item in other)
        values["iter/comparator_unfinished"] = sum(item.unfinished for item in other)
        if self._reward_range:
            values |= self._distribution(collected, mine, other, round)
        return collected, values

    _scores_learned = False

    def _score(self, items: Sequence[SampledItem]) -> None:
        """Scores responses otherwise than by the task reward, where `_scores_learned` says so."""

    def _comparator_policies(self, round: int) -> dict[str, PolicyWeights]:
        """Who answers for the comparator in a round, with which weights."""
        comparator = self.comparator
        if comparator.sources:
            return comparator.policies({})
        if self.args.comparator_policy != "history":
            return comparator.policies(dict(enumerate(self.session.policies().values())))
        # Before round ν the current policy is the one after round ν−1, folder ν−2; k rounds before it is folder ν−2−k.
        index = round - 2 - self.args.history_k
        weights = {}
        for i, source in enumerate(self.setup.sources):
            folder = str(self.policy_folders.path(index) / agent_name(i))
            old = index >= 0 and self.args.learns(i)
            weights[i] = policy_on_disk(agent_name(i), folder if old else self.session.start_of(i), source)
        return comparator.policies(weights)

    def _weight_hashes(self, weights: dict[str, PolicyWeights]) -> dict[str, float]:
        """Which weights were compared with which; equal numbers are equal weights."""
        current = self._current_hashes()
        values: dict[str, float] = {agent_metric("iter/weights", i): h for i, h in enumerate(current)}
        known = {policy.key: h for policy, h in zip(self.session.policies().values(), current)}
        for k, policy in enumerate(weights.values()):
            # The key of any other weights is the folder that they are in.
            found = known[policy.key] if policy.key in known else self._hash_on_disk(policy.key)
            values[agent_metric("iter/comparator_weights", k)] = found
        return values

    def _current_hashes(self) -> list[int]:
        if self._hashes is None:
            from comlrl_ds.engines.fingerprint import hash_on_disk

            session = self.session
            folders = [session.current_of(i) for i in range(self.args.num_actors)]
            self._hashes = [hash_on_disk(folder, session.rollout_dtype) for folder in folders]
        return self._hashes

    def _hash_on_disk(self, folder: str) -> int:
        """Read once: a folder of this run, or of a model, keeps its weights."""
        from comlrl_ds.engines.fingerprint import hash_on_disk

        if folder not in self._folder_hashes:
            self._folder_hashes[folder] = hash_on_disk(folder, self.session.rollout_dtype)
        return self._folder_hashes[folder]

    def _of_sides(
        self, collected: Collected, mine: Sequence[SampledItem], other: Sequence[SampledItem], round: int
    ) -> dict[str, float]:
        compared = max(collected.compared, 1)
        sizes = self._sizes(round - 1)
        return {
            "iter/current_iteration": round, "iter/current_preference_pairs": len(collected.pairs),
            "iter/total_preference_pairs": sum(sizes.values()) + len(collected.pairs),
            "iter/compared": collected.compared, "iter/missing": collected.missing,
            "iter/win_rate": (collected.wins + 0.5 * collected.ties) / compared if collected.compared else math.nan,
            "iter/tie_share": collected.ties / compared if collected.compared else math.nan,
            "iter/target_reward_mean": mean_score(mine), "iter/comparator_reward_mean": mean_score(other),
        }  # fmt: skip

    def _distribution(
        self, collected: Collected, mine: Sequence[SampledItem], other: Sequence[SampledItem], round: int
    ) -> dict[str, float]:
        assert self._reward_range
        raws = lambda side: [s.raw for item in side for s in item.scores]  # noqa: E731
        sides = {
            "candidate": (raws(mine), raws(other)),
            "selected": (
                [float(p.target_raw_reward or 0) for p in collected.pairs],
                [float(p.comparator_raw_reward or 0) for p in collected.pairs],
            ),
        }
        write_distribution(self.run_dir.distributions, round, self._reward_range, **sides)
        content = distribution_content(round, self._reward_range, **sides)
        return distribution_metrics(content, pair_count=len(collected.pairs))

    def _of_comparison(self, values: dict[str, Any]) -> str:
        rate = values["iter/win_rate"]
        missing = f", {values['iter/missing']} without an answer" if values["iter/missing"] else ""
        won = "none" if rate is None else f"{rate:.2f}"
        missing += "" if self.comparator.builder is None else overlong_text(self.comparator.builder)
        if values["iter/comparator_cut"]:
            missing += f", {values['iter/comparator_cut']:.0f} answers cut to max_new_tokens"
        return f"; round {values['iter/current_iteration']} against {self.args.comparator_policy}: win rate {won}{missing}"

    # --- replay
    def _sizes(self, upto: int) -> dict[int, int]:
        return self.round_folder.sizes(range(1, upto + 1))

    def _select(self, pairs: list[PreferencePair], progress: Progress) -> list[PreferencePair]:
        round, settings = progress.round, self.args.replay
        fresh = progress.epoch == progress.batches == 0
        if settings.mode == "current":
            selected, changed, parts = pairs, 0, {round: 1.0} if pairs else {}
        else:
            drawn = draw(self._sizes(round), settings, self.seed, round)
            replayed = self.round_folder.replayed(drawn)
            selected, changed, parts = replayed.pairs, replayed.changed, shares(drawn)
        if fresh:
            values: dict[str, float] = {"iter/train_preference_pairs": len(selected), "iter/retokenized_pairs": changed}
            values |= {f"iter/replay_share/round_{r:04d}": share for r, share in parts.items()}
            self.reporter.log(values)
            if not selected:
                self.display.say(f"round {round}: no pair to train on")
        return selected

    # --- the end of a round
    def _end_round(self, progress: Progress) -> None:
        round = progress.round
        if self._evaluates:
            self._evaluate_once(f"after round {round}")
        self._measure(round)
        if self.args.saves_policies:
            self._save_policies(round)
        progress.next_round()
        self._save_if_due(progress, end_of_epoch=True)

    def _measure(self, round: int) -> None:
        """Drift from the start policy, and the win rate over it on the held-out tasks."""
        from comlrl_ds.engines.fingerprint import fingerprint

        session, dtype = self.session, self.session.rollout_dtype
        session.to_training()
        calls = {}
        for i, (role, source) in enumerate(zip(session.actors, self.setup.sources)):
            start = session.start_of(i)
            calls[role] = call(fingerprint, source, dtype, start if start != source else None)
        found = self.cluster.run(calls)
        rows = [found[role] for role in session.actors]
        self._hashes = [int(number) for number, _ in rows]
        values: dict[str, float] = {agent_metric("iter/drift", i): drift for i, (_, drift) in enumerate(rows)}
        row: dict[str, Any] = {"round": round, "drift": max(drift for _, drift in rows)}
        if self._evaluates and self.evaluations:
            last = self.evaluations[-1][1]
            values["iter/win_rate_over_initial"] = rate = win_rate_over(last, self.evaluations[0][1])
            row |= {"mean": last.mean, "error": last.standard_error, "win_rate": rate}
        self._rounds.append(row)
        self.reporter.log(values)

    def _save_policies(self, round: int) -> None:
        folders = self.policy_folders
        if round == 1 and self.args.policy_checkpoint_dir is not None and not folders.path(-1).exists():
            folders.save(-1, self._copy_sources)
        folders.save(round - 1, self.save_model)
        if not self.args.keeps_policies:
            # An older checkpoint may be gone on from, so what its round needs stays, too.
            oldest = min([*self._checkpointed_rounds(), round])
            folders.drop_before(oldest - 2 - self.args.history_k)

    def _copy_sources(self, folder: Path) -> None:
        import shutil

        for i, source in enumerate(self.setup.sources):
            start = self.session.start_of(i)
            if start != source or self.lora[i] is None:  # an adapter that starts from nothing is nothing
                shutil.copytree(start, folder / agent_name(i))

    def _checkpointed_rounds(self) -> list[int]:
        from comlrl_ds.runs.checkpoints import CheckpointError, read_checkpoint

        rounds = []
        for folder in self._saver.store.folders() if self._saver else ():
            try:
                rounds.append(int(read_checkpoint(folder).state["progress"]["round"]))
            except CheckpointError:
                continue  # it will not be gone on from
        return rounds

    def _show_results(self) -> None:
        self.display.round_table(self._rounds, self.evaluations[0][1] if self.evaluations else None)

    def _more_state(self) -> dict[str, Any]:
        return super()._more_state() | {"rounds": self._rounds, "hashes": self._hashes}

    def _restore_more(self, state: dict[str, Any]) -> None:
        self._rounds, self._hashes = list(state["rounds"]), state["hashes"]
