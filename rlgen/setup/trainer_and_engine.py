"""Opens trainer and engine with the same weights. A run trains with them, and `rlgen doctor` compares the two."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from rlgen.algorithms.registry import build_algorithm
from rlgen.engines.base import Engine
from rlgen.engines.open import build_engine
from rlgen.engines.plan import EnginePlan
from rlgen.errors import EngineError, SetupError
from rlgen.models.memory_errors import memory_for
from rlgen.models.policy import Policy
from rlgen.models.routing import is_mixture
from rlgen.processes import EngineShare, Processes
from rlgen.recipe import Recipe
from rlgen.recipe.models import RolloutRecipe
from rlgen.recipe.rules import no_routes
from rlgen.sentinel.sync import send_weights
from rlgen.setup.data import Data
from rlgen.setup.policy import open_policies
from rlgen.setup.settings import TrainSettings
from rlgen.setup.train_state import TrainState, open_train_state, restore
from rlgen.types import Position, Sampling

TRIED = 8  # prompts on which packed rows are tried


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerAndEngine:
    """Trainer and engine, open. The caller that opened them closes them."""

    data: Data
    sampling: Sampling  # settings of the run
    state: TrainState
    engine: Engine  # of this process
    processes: Processes
    engine_share: EngineShare  # which engine this rank uses, and which ranks share it
    position: Position  # step of the weights on both sides

    def close(self) -> None:
        """The trainer holds nothing but memory."""
        self.engine.close()


def open_trainer_and_engine(
    data: Data,
    checkpoint: Path | None,
    processes: Processes,
    logs: Path,
    say: Callable[[str], None],
    began_with: str | None = None,  # digest of the weights that were in model.path then; None: not known
) -> TrainerAndEngine:
    """Opens policy, engine and the rest of the train state, in this order, and sends the weights if the engine has others.

    The order follows from memory. On a GPU vLLM starts only if its share of the memory is free. With only the policy loaded, this
    holds for a resumed run as for a fresh one: a whole reference and the optimizer's state are allocated after the engine. A
    sharded reference is loaded as the policy is, right after it; it takes only a part of one policy's memory.

    The order also keeps the ranks in step: each makes the same calls, and all build their engines at the same time, since
    they wait for each other inside vLLM.
    """
    recipe, prompts = data.recipe, [prompt.prompt_ids for prompt in data.prompts.take(0, TRIED)]
    settings = TrainSettings.of(recipe, data.location, prompts)
    engine_share = EngineShare.of(processes, recipe.engine.callers)
    algorithm = build_algorithm(recipe.trainer)
    say(f"model: loading {recipe.model.path} …")
    policies = open_policies(settings, algorithm, checkpoint, processes, began_with, say)
    if policies.policy.unpacked:
        prompt, rows, longest = max(map(len, prompts)), recipe.rollout.group_size, recipe.rollout.max_completion_tokens
        times = rows * (prompt + longest) / (prompt + rows * longest)  # with padding every row of a group has its prompt
        say(f"optim.packing: off, an update computes up to {times:.1f} times the tokens: {policies.policy.unpacked}")
    needs = replace(recipe.engine_needs, experts=replays_routes(recipe, policies.policy, data.location, say))
    say(f"engine: {recipe.engine.starts} …")
    with memory_for("the engine's start", settings.memory_advice("load"), EngineError):
        engine = build_engine(needs, data.location, processes, logs, say)
    with ExitStack() as undo:
        undo.callback(engine.close)
        state = open_train_state(settings, algorithm, policies)
        position = restore(state, checkpoint, processes)
        if engine.weight_version != position.step or recipe.model.quantization:  # the engine holds other weights than the trainer
            send_weights(engine, state.policy.model, position.step, processes)
        undo.pop_all()
    return TrainerAndEngine(
        data=data,
        sampling=sampling_of(recipe.rollout, recipe.structured_regex, data.stop_ids, state.policy.head.weight.shape[0]),
        state=state,
        engine=engine,
        processes=processes,
        engine_share=engine_share,
        position=position,
    )


def replays_routes(recipe: Recipe, policy: Policy, location: str, say: Callable[[str], None]) -> bool:
    """Returns whether answers are to have the experts of their tokens; the policy is then ready to compute by them.

    Raises SetupError if the recipe asks for it, and engine or model cannot do it. Where it leaves it open, a line says why not.
    """
    wanted, mixture = recipe.model.route_replay, is_mixture(policy.model.config)
    if wanted is False or not (wanted or mixture):
        return False
    reason = no_routes(recipe) if mixture else f"{type(policy.model).__name__} has no experts to choose from"
    reason = reason or EnginePlan.of(recipe.engine_needs, location).without_experts() or policy.replay_routes()
    if reason and wanted:
        raise SetupError(f"model.route_replay: {reason}; remove it, and the routers of the trainer choose by themselves")
    if reason:
        say(f"model.route_replay: off: {reason}")
    return reason is None


def sampling_of(rollout: RolloutRecipe, regex: str | None, stop_ids: tuple[int, ...], vocab_size: int | None) -> Sampling:
    return Sampling(
        max_tokens=rollout.max_completion_tokens,
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        min_p=rollout.min_p,
        stop=tuple(rollout.stop),
        stop_ids=stop_ids,
        vocab_size=vocab_size,
        regex=regex,
    )
