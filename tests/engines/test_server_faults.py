"""What can happen to a server, done to a real one: each ends in bounded time, with a name, or in a recovery that is told.

After a recovery the answers are those of a server that nothing happened to, to the last bit: ids and log-probs follow from
requests and weights alone.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import plan_of, tiny_model
from helpers.engines import changed, kill, recoveries, server_plan
from helpers.samples import make_sample
from helpers.waiting import HANGS

from rlgen.engines import fleet as fleet_module
from rlgen.engines.base import EngineCapabilities, Pending, SyncReport, model_shape
from rlgen.engines.fleet import ServerPool
from rlgen.engines.http import Server, WeightsKept
from rlgen.engines.launch import new_token, start_servers
from rlgen.engines.server import ServerEngine
from rlgen.engines.transfer import FileTransfer
from rlgen.errors import RlgenError, ServerLost
from rlgen.models.weights import checkpoint_tensors
from rlgen.rollout.samples import Samples
from rlgen.types import Completion, Request, Sampling, ids_of

Proof = Callable[[str], None]

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
TIMEOUT = 6.0  # seconds without an answer
SAMPLING = Sampling(max_tokens=128, temperature=1.0, stop_ids=tuple(range(240, 258)))  # of very unequal lengths
REQUESTS = [Request(prompt_ids=ids_of(range(3, 5 + place % 7)), seed=1000 + place) for place in range(48)]


class Bench:
    """A launched server, an engine on it, and what the engine says."""

    def __init__(self, folder: Path) -> None:
        self.token = new_token()
        # Most requests wait: what happens when some have answered happens long before the last has.
        plan = server_plan(plan_of("qwen3", max_model_len=256, max_num_seqs=8))
        self.process = start_servers([plan], self.token, [folder / "server.log"], 120)[0]
        self.said: list[str] = []
        self.model = changed(tiny_model("qwen3"))

    def engine(
        self, supervised: bool = True, restarts: int = 2, in_flight: bool = False, keeps_cache: bool = False, **other: str
    ) -> ServerEngine:
        """On the server, or at another `url`, or with another `token`."""
        self.said.clear()
        if not all(process.is_running() for process in self.process.processes()) or not self.process.processes():
            self.process.restart()  # a test before this one left it dead
        at = Server(other.get("url", self.process.url), other.get("token", self.token), TIMEOUT)
        fleet = ServerPool(
            servers=[at],
            processes={self.process.url: self.process} if supervised else {},
            shape=model_shape(self.model.config),
            row_tokens=0,
            abilities=EngineCapabilities(in_flight=in_flight, keeps_cache=keeps_cache),
            restarts=restarts,
            carrier=FileTransfer(None),
            say=self.said.append,
        )
        return ServerEngine(fleet)

    @contextmanager
    def opened(self, **settings: Any) -> Iterator[ServerEngine]:
        """Such an engine that has sent its weights as version 1. Closed is all but the server, which other tests go on with."""
        engine = self.engine(**settings)
        engine.sync(checkpoint_tensors(self.model), 1)
        yield engine
        close(engine)

    @contextmanager
    def other_weights(self) -> Iterator[None]:
        """Inside the block, the model has others, which compute other keys and values."""
        norm = self.model.model.layers[0].input_layernorm.weight.data
        own = norm.clone()
        norm.mul_(1.5)
        yield
        norm.copy_(own)

    def kill(self) -> None:
        kill(self.process.processes())

    def signal_server(self, number: int) -> None:
        for process in self.process.processes():
            process.send_signal(number)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    opened = Bench(tmp_path_factory.mktemp("server"))
    yield opened
    opened.process.stop()


@pytest.fixture(scope="module")
def undisturbed(bench: Bench) -> list[Completion]:
    with bench.opened() as engine:
        answers = engine.generate(REQUESTS, SAMPLING)
    assert len({answer.token_ids.tobytes() for answer in answers}) == len(REQUESTS)
    return answers


@pytest.fixture
def engine(bench: Bench, undisturbed: list[Completion]) -> Iterator[ServerEngine]:
    """With the weights that `undisturbed` was sampled by."""
    with bench.opened() as opened:
        yield opened


def close(engine: ServerEngine) -> None:
    """All but the server, which other tests go on with."""
    engine._background.shutdown(wait=False, cancel_futures=True)
    engine._keeper.close()


def failure(action: Callable[[], Any], within: float) -> RlgenError:
    """The error that `action` ends with, in time."""
    began = time.monotonic()
    with pytest.raises(RlgenError) as caught:
        action()
    assert time.monotonic() - began < within
    return caught.value


@pytest.mark.fault(50, 86)
def test_a_server_that_cannot_be_used(bench: Bench, proof: Proof) -> None:
    error = failure(lambda: bench.engine(url="http://127.0.0.1:9"), within=5)
    assert isinstance(error, ServerLost) and error.exit_code == 6 and "http://127.0.0.1:9 cannot be reached" in str(error)
    proof(f"nobody listens: {error}")
    error = failure(lambda: bench.engine(token="guessed"), within=5)
    assert error.exit_code == 6 and "engine.token_env" in str(error) and bench.token not in str(error)
    proof("another token than the server's")
    shape = model_shape(tiny_model("llama").config)
    error = failure(lambda: ServerPool._examined(Server(bench.process.url, bench.token, TIMEOUT), shape), within=5)
    assert error.exit_code == 6 and "model_type is qwen3 there, llama here" in str(error)
    proof("a qwen3 server asked as for a llama")


@pytest.mark.fault(51)
def test_killed_while_idle(bench: Bench, engine: ServerEngine, undisturbed: list[Completion], proof: Proof) -> None:
    bench.kill()
    assert engine.generate(REQUESTS, SAMPLING) == undisturbed
    assert recoveries(engine) == 1
    assert "cannot be reached" in bench.said[0] and "starting it again" in bench.said[0] and "version 1" in bench.said[1]
    proof("SIGKILL to all processes of a real server; one recovery counted")


@pytest.mark.timed
@pytest.mark.fault(51)
def test_killed_while_idle_when_nobody_can_start_it(bench: Bench, undisturbed: list[Completion], proof: Proof) -> None:
    with bench.opened(supervised=False) as engine:
        bench.kill()
        error = failure(lambda: engine.generate(REQUESTS, SAMPLING), within=5)
        assert isinstance(error, ServerLost) and recoveries(engine) == 0
        # Started anew by whoever runs it, it answers with the weights of its folder: it is stale until it is given ours.
        bench.process.restart()
        assert engine.generate(REQUESTS, SAMPLING) == undisturbed
        assert recoveries(engine) == 1 and "has the weights of version 1 again" in bench.said[0]
    proof("SIGKILL to a server that nobody restarts")


@pytest.mark.fault(51)
def test_killed_while_generating(bench: Bench, engine: ServerEngine, undisturbed: list[Completion], proof: Proof) -> None:
    arrived: list[int] = []

    def one_more(place: int, answer: Completion) -> None:
        arrived.append(place)
        if len(arrived) == 5:
            bench.kill()

    assert engine.generate(REQUESTS, SAMPLING, one_more) == undisturbed
    assert recoveries(engine) == 1
    assert len(arrived) == len(set(arrived)) == len(REQUESTS)  # what had arrived was not asked again
    proof("SIGKILL when 5 of 48 answers had arrived; none was asked twice")


@pytest.mark.timed
@pytest.mark.fault(52)
def test_hanging_while_healthy(bench: Bench, engine: ServerEngine, undisturbed: list[Completion], proof: Proof) -> None:
    Server(bench.process.url, bench.token, TIMEOUT).pause()  # it takes requests and passes its health check
    began = time.monotonic()
    assert engine.generate(REQUESTS, SAMPLING) == undisturbed
    assert "has answered none for" in bench.said[0] and "still passes its health check" in bench.said[0]
    assert recoveries(engine) == 1 and time.monotonic() - began < 90
    proof(f"paused server: {bench.said[0]}")


@pytest.mark.timed
@pytest.mark.fault(51, 52)
def test_hanging_when_nobody_can_start_it(bench: Bench, undisturbed: list[Completion], proof: Proof) -> None:
    with bench.opened(supervised=False) as engine:
        bench.signal_server(signal.SIGSTOP)
        try:
            error = failure(lambda: engine.generate(REQUESTS, SAMPLING), within=60)
        finally:
            bench.signal_server(signal.SIGCONT)
        assert isinstance(error, ServerLost) and "health check" in str(error)
    proof(f"SIGSTOP to a server: {error}")


@pytest.mark.fault(56)
def test_killed_during_a_sync(bench: Bench, engine: ServerEngine, proof: Proof) -> None:
    load = Server.load
    fired: list[int] = []

    def killing(self: Server, folder: str, version: int, hashed: bool) -> SyncReport:
        if not fired:
            fired.append(os.getpid())
            bench.signal_server(signal.SIGSTOP)  # it gets the order and does not carry it out
            threading.Timer(1.0, bench.kill).start()
        return load(self, folder, version, hashed)

    with bench.other_weights(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Server, "load", killing)
        receipt = engine.sync(checkpoint_tensors(bench.model), 2, hashed=True)
        assert fired and receipt.version == engine.weight_version == 2 and recoveries(engine) == 1
        answers = engine.generate(REQUESTS[:8], SAMPLING)
        assert {answer.weight_version for answer in answers} == {2}
        assert_log_probs(bench, answers, version=2)
    proof("a server stopped by SIGSTOP with the order to load, then killed")


@pytest.mark.fault(54)
def test_a_transfer_file_cut_off(bench: Bench, engine: ServerEngine, undisturbed: list[Completion], proof: Proof) -> None:
    write = FileTransfer.write

    def cutting(self: FileTransfer, weights: Any, version: int) -> Path:
        folder = write(self, weights, version)
        file = next(folder.glob("*.safetensors"))
        os.truncate(file, file.stat().st_size // 2)
        return folder

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fleet_module.FileTransfer, "write", cutting)
        error = failure(lambda: engine.sync(checkpoint_tensors(bench.model), 2), within=10)
    assert isinstance(error, WeightsKept) and "bytes, but" in str(error) and "model-00000.safetensors" in str(error)
    assert engine.weight_version == 1  # the server goes on with the weights it had, and says so
    assert engine.generate(REQUESTS, SAMPLING) == undisturbed
    proof("half of a file of weights cut off")


@pytest.mark.fault(61)
def test_brought_back_often_enough(bench: Bench, undisturbed: list[Completion], proof: Proof) -> None:
    with bench.opened(restarts=0) as engine:
        Server(bench.process.url, bench.token, TIMEOUT).set_label("other.7")
        error = failure(lambda: engine.generate(REQUESTS, SAMPLING), within=5)
        assert error.exit_code == 6 and "engine.restarts" in str(error) and "not those of this run" in str(error)
    proof(f"weights labelled by another run: {error}")


@pytest.mark.fault(61)
def test_taken_over_by_another_run(bench: Bench, engine: ServerEngine, undisturbed: list[Completion], proof: Proof) -> None:
    other = bench.engine()
    with bench.other_weights():
        other.sync(checkpoint_tensors(bench.model), 1)
    assert engine.generate(REQUESTS, SAMPLING) == undisturbed
    assert recoveries(engine) == 1 and len(bench.said) == 1
    close(other)
    proof(f"another run's sync to the same server: {bench.said[0]}")


def test_a_cache_that_another_run_filled_is_not_kept(bench: Bench) -> None:
    """The server gets the same version again, so repeated requests have the salt of those that the other weights computed."""
    engine, other = (bench.engine(in_flight=True, keeps_cache=True) for _ in range(2))
    prompt = ids_of([5 + place % 200 for place in range(130)])  # longer than a block of the prefix cache
    engine.sync(checkpoint_tensors(bench.model), 1)
    with bench.other_weights():
        other.sync(checkpoint_tensors(bench.model), 1)
    answers = engine.generate([Request(prompt_ids=prompt, seed=3000 + place) for place in range(8)], SAMPLING)
    assert recoveries(engine) == 1 and {answer.spans[0].version for answer in answers} == {1}
    assert_log_probs(bench, answers, version=1)
    for one in (engine, other):
        close(one)


def half_answered(engine: ServerEngine, requests: Sequence[Request]) -> Pending:
    """Submits the requests, and returns when eight are answered: eight are under way then, and others wait."""
    answered = threading.Semaphore(0)
    sampling = Sampling(max_tokens=110, temperature=1.0, stop_ids=tuple(range(254, 258)))
    pending = engine.submit(requests, sampling, lambda *_: answered.release())
    assert all(answered.acquire(timeout=HANGS) for _ in range(8)) and not pending.done()
    return pending


def test_weights_change_under_requests_that_are_being_answered(bench: Bench, undisturbed: list[Completion]) -> None:
    """Not a fault: `engine.in_flight`. Every token has the log-prob of the weights that its span names, whoever sampled what is
    before it: the server has computed that again."""
    with bench.opened(in_flight=True) as engine:
        pending = half_answered(engine, REQUESTS)
        with bench.other_weights():
            engine.sync(checkpoint_tensors(bench.model), 2)
            assert not pending.done()  # nobody waited for them
            begun = pending.result()
            assert [answer.prompt_ids.tolist() for answer in begun] == [request.prompt_ids.tolist() for request in REQUESTS]
            assert min(answer.weight_version for answer in begun) == 1 and recoveries(engine) == 0
            assert all(len(answer.logp) == len(answer.token_ids) for answer in begun)
            assert_log_probs(bench, begun, version=2)
            later = engine.generate(REQUESTS[:8], SAMPLING)
            assert {answer.weight_version for answer in later} == {2}
            assert_log_probs(bench, later, version=2)
        assert_log_probs(bench, begun, version=1)
        mixed = [answer.spans for answer in begun if len(answer.spans) > 1]
        # More than the first token, which vLLM tells of at once, are of the weights that were there before.
        assert mixed and all([span.version for span in spans] == [1, 2] and spans[0].stop == spans[1].start for spans in mixed)
        assert max(spans[0].stop for spans in mixed) > 5
        assert [answer.logp.tolist() for answer in later] != [answer.logp.tolist() for answer in undisturbed[:8]]


def test_requests_keep_their_cache_when_weights_change(bench: Bench) -> None:
    """Not a fault: `engine.in_flight: {recompute: false}`. Each token has the log-prob that transformers computes with a cache
    whose first part is by the earlier weights. What waited for the sync says so by an empty span."""
    engine = bench.engine(in_flight=True, keeps_cache=True)
    prompt = ids_of([5 + place % 200 for place in range(130)])  # longer than a block of the prefix cache
    requests = [Request(prompt_ids=prompt, seed=2000 + place) for place in range(64)]  # the server answers eight at a time
    engine.sync(checkpoint_tensors(bench.model), 1)
    pending = half_answered(engine, requests)
    with bench.other_weights():
        engine.sync(checkpoint_tensors(bench.model), 2)
        assert not pending.done()
        begun = pending.result()
        later = engine.generate(requests[:8], SAMPLING)
        assert {answer.spans[0].version for answer in later} == {2}
        assert_log_probs(bench, later, version=2)
    crossed = [answer for answer in begun if [span.version for span in answer.spans] == [1, 2]]
    under_way, waited = ([one for one in crossed if bool(one.spans[0].stop) is begun] for begun in (True, False))
    assert under_way and waited and any(answer.cached_tokens for answer in waited)
    for answer in crossed:
        first = answer.spans[0].stop
        begins = len(prompt) + first - 1 if first else answer.cached_tokens  # of what the new weights computed
        ids = torch.tensor([[*prompt.tolist(), *answer.token_ids.tolist()]])
        with torch.no_grad():
            cache = bench.model(ids[:, :begins], use_cache=True).past_key_values if begins else None
            with bench.other_weights():
                logits = bench.model(ids[:, begins:], past_key_values=cache).logits[0].float()
        at = torch.arange(first, len(answer.token_ids))
        own = logits.log_softmax(-1)[len(prompt) + at - 1 - begins, ids[0, len(prompt) + at]]
        assert own.tolist() == pytest.approx(answer.logp[first:].tolist(), abs=1e-5)
    samples = Samples.of([make_sample(completion_ids=one.token_ids, sampler_logp=one.logp, spans=one.spans) for one in begun], ())
    compared = samples.covered(samples.spans_by(2, whole=True).values)
    assert [compared[row].any() for row in range(len(begun))] == [[span.version for span in one.spans] == [2] for one in begun]
    close(engine)


def assert_log_probs(bench: Bench, answers: list[Completion], version: int) -> None:
    """Those of the weights that `bench.model` has, of the tokens that `version` sampled."""
    compared = 0
    for answer in answers:
        ids = torch.tensor([[*answer.prompt_ids.tolist(), *answer.token_ids.tolist()]])
        with torch.no_grad():
            logp = bench.model(ids).logits[0].float().log_softmax(-1)
        first = len(answer.prompt_ids)
        for span in answer.spans:
            if span.version == version:
                at = range(span.start, span.stop)
                own = [logp[first - 1 + place, answer.token_ids[place]].item() for place in at]
                assert own == pytest.approx(answer.logp[span.start : span.stop].tolist(), abs=1e-5)
                compared += len(at)
    assert compared
