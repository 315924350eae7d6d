"""Sends weights to an engine, and checks that what it received is what was sent."""

from collections.abc import Mapping
from functools import partial

from transformers import PreTrainedModel

from rlgen.engines.base import Engine, SyncRecorder, SyncReport, cast_for
from rlgen.errors import Fault, SentinelError
from rlgen.models.lora import is_adapted
from rlgen.models.weights import adapter_factors, checkpoint_tensors, gone_through
from rlgen.processes import Processes


def send_weights(
    engine: Engine, model: PreTrainedModel, version: int, processes: Processes, hashed: bool = False, whole: bool = False
) -> None:
    """Sends the weights of `model` to this process's engine, in its dtype, and compares its receipt with what was sent.

    Of an adapted model only the adapter is sent to an engine that merges it itself. The engine computes the receipt before it
    packs its weights, because hashes of packed weights cannot be compared. What it does with them afterwards only a comparison of
    log-probs shows. All processes must call this at the same time; an error in one is raised in all.

    Args:
        hashed: compare the bytes, too; otherwise only names, dtypes and shapes.
        whole: send all weights even to an engine that merges an adapter itself, because weights outside of it have changed.

    Raises:
        SentinelError: a tensor is missing, unexpected, changed or exchanged with another.
        EngineError: the engine failed.
    """

    def send() -> None:
        sent = SyncRecorder(hashed)
        if engine.abilities.merges and is_adapted(model) and not whole:
            weights = sent.record(adapter_factors(model))
        else:
            weights = sent.record(checkpoint_tensors(model, partial(cast_for, engine.facts())))
        with gone_through(weights):  # records tensors that the engine did not read as sent, too
            receipt = engine.sync(weights, version, hashed)
        check_receipt(sent.received, receipt, version, engine.weight_version)

    processes.run_all(send)


def check_receipt(sent: Mapping[str, str], receipt: SyncReport, version: int, echoed: int) -> None:
    """Compares the engine's receipt and its version `echoed` with what was `sent`.

    Raises:
        SentinelError: they differ.
    """
    where = f"weight sync to version {version}"
    if receipt.version != version or echoed != version:
        raise SentinelError(
            Fault.STALE_WEIGHTS,
            f"the engine reports that it received version {receipt.version} and uses version {echoed}, but {version} was sent",
            where,
        )
    got = receipt.received
    missing = sorted(set(sent) - set(got)) + sorted(receipt.not_loaded, key=lambda name: name in sent)
    if missing:
        raise SentinelError(
            Fault.INCOMPLETE_SYNC,
            f"{len(missing)} tensors did not arrive or were not loaded, among them {', '.join(missing[:3])}: the engine still has"
            " their earlier values",
            where,
        )
    if extra := sorted(set(got) - set(sent)):
        raise SentinelError(Fault.INCOMPLETE_SYNC, f"the engine received {extra[0]}, which was not sent", where)
    other = [name for name in sent if got[name] != sent[name]]
    if not other:
        return
    senders = {print_: name for name, print_ in sent.items()}
    if all(got[name] in senders for name in other) and len(other) > 1:
        sentence = f"{other[0]} arrived as {senders[got[other[0]]]}: tensors changed places on the way"
        raise SentinelError(Fault.SWAPPED_TENSORS, sentence, where)
    raise SentinelError(
        Fault.STALE_WEIGHTS if len(other) == len(sent) else Fault.STALE_TENSOR,
        f"{len(other)} of {len(sent)} tensors arrived with changed values, dtypes or shapes, among them"
        f" {', '.join(other[:3])} (sent {sent[other[0]][:40]}, received {got[other[0]][:40]})",
        where,
    )
