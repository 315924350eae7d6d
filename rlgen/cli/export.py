"""Exports a checkpoint as a model of its own with a model card, which is opened again and compared before it gets its final
name, and sends it to the hub if asked: `rlgen export`.
"""

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, Option

from rlgen.cli.groups import AsJson, CheckpointStep
from rlgen.cli.output import echo
from rlgen.errors import CheckpointError, RecipeError, SetupError, UsageError
from rlgen.files import write_text
from rlgen.run.checkpoint_folder import CheckpointFolder
from rlgen.run.directory import pinned_step
from rlgen.run.find import RUNS, find_run, holds_run
from rlgen.run.manifest import NAME, check_files, read_manifest

ROWS, IDS, PREFIX = 4, 32, 8  # rows, ids a row, and first ids of a row without compared log-probs
CARD = "README.md"


def export_command(
    source: Annotated[
        Path, Argument(metavar="RUN_OR_CHECKPOINT", help="A run's directory, its name in runs/, or one of its checkpoints.")
    ],
    out: Annotated[Path, Option("--out", help="Folder to write; it must not exist.")],
    step: CheckpointStep = None,
    dtype: Annotated[Literal["float32", "bfloat16"], Option(help="Dtype of the written weights.")] = "float32",
    push_to_hub: Annotated[
        str | None,
        Option(metavar="REPO", help="Also send it to this repository of the hub, such as me/mine; a new one is private."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint as a model that transformers and vLLM open. Merges adapters, reloads the model
    and compares it, and adds a model card.
    """
    # An atomic rename writes it whole or not at all; it stays if the hub does not take it.
    checkpoint = find_checkpoint(source, step)
    out = out.expanduser().resolve()
    if out.exists():
        raise UsageError(f"--out: {out} exists already; name another folder")
    if push_to_hub is not None:
        from huggingface_hub.utils import HFValidationError, validate_repo_id

        try:
            validate_repo_id(push_to_hub)
        except HFValidationError as error:
            raise UsageError(f"--push-to-hub: {error}") from error
    check_files(checkpoint, hashes=True)
    from rlgen.run.checkpoint import whole_checkpoint

    aside = out.with_name(f".writing_{out.name}")
    # Left by an export that was killed; nothing else uses this name.
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        with whole_checkpoint(checkpoint, out.with_name(f".whole_{out.name}")) as opened:
            report = {"step": read_manifest(checkpoint).step, **write(opened, aside, dtype)}
        report["card"] = write_card(checkpoint, aside, dtype)
        aside.rename(out)
    except OSError as error:
        raise CheckpointError(f"{out} cannot be written: {error}; free space or name another folder") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    report = {"out": str(out), "checkpoint": str(checkpoint), "dtype": dtype, **report}
    if not as_json:
        echo(said_of(report))
    report["pushed"] = None if push_to_hub is None else push(out, push_to_hub, report["step"])
    if as_json:
        echo(json.dumps(report))
    elif push_to_hub is not None:
        echo(f"sent to {report['pushed']}, private if it is new")


def said_of(report: dict[str, Any]) -> str:
    merged = "the adapter merged into its base" if report["adapter"] else "all weights"
    rounding = f"; rounding to {report['dtype']} moves them by {report['rounding_mean_delta']:.1e} on average"
    return (
        f"{report['out']} written: {merged}, step {report['step']}, {report['parameters']:,} parameters in {report['dtype']}\n"
        f"opened again and compared: log-probs equal the policy's within {report['max_delta']:.1e} nats"
        f"{'' if report['dtype'] == 'float32' else rounding}\n"
        f"model card: {report['card'] or 'none, since the checkpoint is not in a run that this version of rlgen can read'}"
    )


def write_card(checkpoint: Path, folder: Path, dtype: str) -> str | None:
    """Writes the model card beside the model, and returns its name; None if the checkpoint lies in no run that can be read."""
    from rlgen.analysis.card import model_card
    from rlgen.analysis.run import read_run

    run = checkpoint.parent.parent
    with suppress(RecipeError):  # a run of another version of rlgen; the model is complete without a card
        if holds_run(run):
            write_text(folder / CARD, model_card(read_run(run), read_manifest(checkpoint).step, dtype))
            return CARD
    return None


def push(folder: Path, repo: str, step: int) -> str:
    """Sends a folder to a repository of the hub, and creates it as a private one if it does not exist. Returns its URL."""
    from huggingface_hub import HfApi

    from rlgen.models.load import bottom

    api = HfApi()
    try:
        url = api.create_repo(repo, private=True, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message=f"Step {step}, by rlgen")
    except Exception as error:  # whatever the client's HTTP library raises
        raise SetupError(
            f"--push-to-hub: {repo} was not sent: {bottom(error)}; log in with `hf auth login`, check name and network, and send"
            f" the written folder: `hf upload {repo} {folder}`"
        ) from error
    return str(url)


def find_checkpoint(source: Path, step: str | None) -> Path:
    """Returns the folder of a checkpoint: `source` itself, or one in the run that `source` names. `step` is then a number, "best"
    (by evaluation) or "last"; None: the last one.
    """
    source = source.expanduser()
    named = not os.path.exists(source) or holds_run(RUNS / source)  # a folder of that name may be no run
    source = (find_run(source) if named else source).resolve()
    if (source / NAME).is_file():
        if step is not None:
            raise UsageError(f"--step: {source} is one checkpoint; name the run's directory to choose among several")
        return source
    written = CheckpointFolder(source / "checkpoints").steps()
    if not written:
        raise UsageError(f"{source} is neither a checkpoint nor the directory of a run that has written one")
    number: int | None
    if step is None or step == "last":
        number = max(written)
    elif step == "best":
        if (number := pinned_step(source)) is None:
            said = "no evaluation has chosen one (`eval`, `eval.best`); give a number or last"
            raise UsageError(f"--step best: {source} has no best checkpoint: {said}")
    elif step.isdecimal():
        number = int(step)
    else:
        raise UsageError(f"--step {step}: give the number of a step, best or last")
    if number not in written:
        raise UsageError(f"--step: {source} has no checkpoint of step {number}; there are {', '.join(map(str, sorted(written)))}")
    return written[number]


def write(checkpoint: Path, folder: Path, dtype: Literal["float32", "bfloat16"]) -> dict[str, Any]:
    """Writes model and tokenizer of `checkpoint` into `folder`, and compares three models: the policy as it was trained, the
    model that is written, and that model opened again. Heavy imports happen here.
    """
    import torch
    from safetensors import SafetensorError
    from transformers.utils.logging import disable_progress_bar

    from rlgen.files import flush_folder
    from rlgen.models.load import load_model, load_tokenizer
    from rlgen.models.lora import CONFIG
    from rlgen.models.vision import Vision, reads_images
    from rlgen.models.weights import own_tensors

    disable_progress_bar()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    adapter = (checkpoint / CONFIG).is_file()
    try:
        if adapter:
            policy, model = adapted_and_merged(checkpoint, device)
        else:
            policy = model = load_model(str(checkpoint), None, torch.float32, "sdpa", device)
        ids = likely_ids(policy)
        trained = log_probs(policy, ids)
        gap = checked_gap("the merged model", trained, log_probs(model, ids))
        # The model still computes in float32, whose noise is far smaller than the rounding.
        with torch.no_grad():
            for tensor in own_tensors(model).values():
                tensor.copy_(tensor.to(getattr(torch, dtype)))
        rounded = log_probs(model, ids)
        model.to(getattr(torch, dtype)).save_pretrained(folder)
        tokenizer = load_tokenizer(str(checkpoint), None)
        if reads_images(model.config):
            Vision.open(str(checkpoint), None, model.config).processor.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        again = load_model(str(folder), None, torch.float32, "sdpa", device)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(f"{checkpoint} cannot be exported: {error!r}") from error
    written, found = own_tensors(model.float()), own_tensors(again)
    if other := sorted(set(written) ^ set(found)):
        raise CheckpointError(f"the written model, reopened, has different tensors, such as {other[0]}")
    if other := [name for name, tensor in written.items() if not tensor.equal(found[name])]:
        raise CheckpointError(f"the written model, reopened, has different values in {other[0]}")
    checked_gap("the written model, opened again,", rounded, log_probs(again, ids))
    if load_tokenizer(str(folder), None).get_vocab() != tokenizer.get_vocab():
        raise CheckpointError("the written tokenizer, reopened, has a different vocabulary")
    flush_folder(folder)
    return {
        "adapter": adapter,
        "parameters": sum(parameter.numel() for parameter in again.parameters()),
        "max_delta": gap.max_delta,
        "rounding_mean_delta": (trained - rounded).abs().mean().item(),
    }


def adapted_and_merged(checkpoint: Path, device: Any) -> tuple[Any, Any]:
    """Returns the policy of an adapter's checkpoint, and a plain model with its merged weights; the plain model is float32."""
    import torch
    from peft import LoraConfig

    from rlgen.models.load import load_model
    from rlgen.models.lora import adapter_metadata, inject, load_adapter
    from rlgen.models.weights import base_digest, checkpoint_tensors, model_tensors, own_tensors

    config, facts = LoraConfig.from_pretrained(str(checkpoint)), adapter_metadata(checkpoint)
    location, revision = str(config.base_model_name_or_path), config.revision
    held = getattr(torch, facts["base_dtype"])
    policy = load_model(location, revision, held, "sdpa", device, facts["quantization"] or None)
    inject(policy, config)
    load_adapter(checkpoint, policy, base_digest(policy))
    model = load_model(location, revision, torch.float32, "sdpa", device)
    own = own_tensors(model)
    with torch.no_grad():
        for name, tensor in model_tensors(model, checkpoint_tensors(policy)):
            own[name].copy_(tensor)
    return (policy if facts["quantization"] else policy.float()), model


def likely_ids(model: Any) -> Any:
    """Returns [ROWS, IDS] token ids: PREFIX random ones from a fixed seed, then the most probable one at each position, because
    differences in the tails of the distribution say little.
    """
    import torch

    size = model.get_output_embeddings().weight.shape[0]
    ids = torch.randint(size, (ROWS, IDS), generator=torch.Generator().manual_seed(0)).to(model.device)
    with torch.no_grad():
        for place in range(PREFIX, IDS):
            ids[:, place] = model(input_ids=ids[:, :place], use_cache=False).logits[:, -1].argmax(-1)
    return ids


def log_probs(model: Any, ids: Any) -> Any:
    """Returns [ROWS, IDS - PREFIX] float64 log-probs of the ids after the first PREFIX ones."""
    import torch

    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[:, PREFIX - 1 : -1]
    return logits.double().log_softmax(-1).gather(-1, ids[:, PREFIX:, None])[..., 0].cpu()


def checked_gap(what: str, expected: Any, found: Any) -> Any:
    """Returns the gap between two tensors of log-probs. Raises CheckpointError if it is beyond rounding in float32."""
    from rlgen.sentinel.bounds import Bounds, Gap

    gap, bounds = Gap.of(expected - found), Bounds(max_delta=1e-4)
    if not bounds.hold(gap):
        raise CheckpointError(f"{what} is not the policy that was trained: {bounds.words(gap)}")
    return gap
