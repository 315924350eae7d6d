"""`rlgen` whose completions are conversations, led by a script: talking.py INSTANT train RECIPE …

INSTANT is one of `tests/run/killed.py`, or "none". Replies come from threads, in any order; after up to REPLY_SECONDS, if the
environment says that. "own/" before it: the recipe itself says what replies, and only the ends of turns are given.
"""

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from helpers.scripted import ConversationState, dialogue, in_threads
from run import killed

from rlgen.rewards import score
from rlgen.setup import data, evaluation, trainer

STOPS = (*range(180, 258), 259)  # of a model that has learned nothing, a turn ends after three tokens or so


def scripted(*arguments: object) -> object:
    return dialogue(times=2, max_turns=3, later=slowly if "REPLY_SECONDS" in os.environ else in_threads)


def slowly(talk: ConversationState, answer: Callable[[], None]) -> None:
    """Replies from a thread each, after times that follow from the place in the group."""
    threading.Timer(float(os.environ["REPLY_SECONDS"]) * (talk.sample_index * 7 % 5) / 4, answer).start()


if __name__ == "__main__":
    instant = sys.argv.pop(1)
    own, instant = instant.startswith("own/"), instant.removeprefix("own/")
    if instant != "none":
        killed.arm(instant)
    opened = score.open_scorer
    data.stop_ids = lambda *given: STOPS
    if not own:
        trainer.open_scorer = evaluation.open_scorer = lambda *given: opened(*given[:6], turns=True)  # type: ignore[assignment]
        trainer.open_dialogue = evaluation.open_dialogue = scripted  # type: ignore[assignment]
    from rlgen.cli.app import main

    main()
