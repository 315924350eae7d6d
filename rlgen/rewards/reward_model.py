"""Scores completions by a sequence-classification model with one label. It is loaded in a worker, which alone imports torch."""

import hashlib
import logging
import os
import resource
from collections.abc import Mapping, Sequence
from math import exp
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlgen.errors import RewardError
from rlgen.recipe.judges import RewardModelArgs
from rlgen.rewards.judge import message_text, win_rates
from rlgen.worker_pool.source import FunctionFacts

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NAMES = ("prompts", "completions", "prompt_messages")
FACTS = FunctionFacts(tuple((name, "KEYWORD_ONLY", True) for name in NAMES), is_async=False, file=None, sha256=None)
FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")  # of a model and its tokenizer
UNLIMITED = 1 << 60  # tokens
log = logging.getLogger(__name__)  # its warnings go to logs/rewards.log, like all that a worker prints


class TooLong(Exception):
    """Raised for a row that is longer than the model takes."""


class RewardModel:
    def __init__(self, settings: RewardModelArgs, further: int) -> None:
        """Loads model and tokenizer, and then limits this process to `further` bytes more. Raises RewardError if there is no such
        model, or it does not give one score to a text.
        """
        self._settings = settings
        folder = folder_of(settings)
        self.sha256 = model_digest(folder)
        self._tokenizer, self._model = load_parts(folder, settings)
        self._config = self._model.config.get_text_config()
        positions = getattr(self._config, "max_position_embeddings", None) or UNLIMITED
        self._most = min(settings.max_tokens or UNLIMITED, positions, self._tokenizer.model_max_length)
        self._rows = self._cut = 0  # scored so far, and those of them that lost their start
        limit_memory(further)

    def score(self, *, prompts: Sequence[str], completions: Sequence[str], prompt_messages: Sequence[Any]) -> list[float | None]:
        """Returns the score of each completion of a group; with `pairwise` its win rate, by the probabilities of Bradley-Terry.

        Raises:
            RewardError: a prompt is a chat, and the tokenizer has no chat template.
            TooLong: a row is too long, and `overlong` is error.
        """
        before = self._cut
        rows = [
            self._ids(prompt, messages, completion)
            for prompt, messages, completion in zip(prompts, prompt_messages, completions, strict=True)
        ]
        if self._cut > before:
            log.warning("reward_model: %d of %d rows so far had more than %d tokens", self._cut, self._rows, self._most)
        scores: dict[int, float] = {}
        for batch in batches([len(row) for row in rows], self._settings.batch_tokens):
            scores.update(zip(batch, self._scores([rows[place] for place in batch]), strict=True))
        found = [scores[place] for place in range(len(rows))]
        return win_rates(found, lambda one, other: sigmoid(one - other)) if self._settings.pairwise else [*found]

    def _ids(self, prompt: str, messages: Sequence[Mapping[str, Any]] | None, completion: str) -> list[int]:
        """Returns the ids of a prompt and a completion, by the model's own tokenizer and template."""
        chat = messages is not None if self._settings.chat is None else self._settings.chat
        text = prompt + completion
        if chat and not self._tokenizer.chat_template:
            raise RewardError("the prompt is a chat, and the reward model has no chat template; set args.chat to false")
        if chat:
            turns = [{"role": "user", "content": prompt}] if messages is None else messages
            turns = [*({**turn, "content": message_text(turn)} for turn in turns), {"role": "assistant", "content": completion}]
            text = self._tokenizer.apply_chat_template(turns, tokenize=False)
        ids: list[int] = self._tokenizer(text, add_special_tokens=not chat, verbose=False)["input_ids"]
        self._rows += 1
        if len(ids) <= self._most:
            return ids
        if self._settings.overlong == "error":
            raise TooLong(f"prompt and completion have {len(ids)} tokens, but the model takes {self._most}; see `overlong`")
        self._cut += 1
        # A score is read at the end; that of an encoder at its first token.
        first = ids[:1] if ids[0] in (self._tokenizer.cls_token_id, self._tokenizer.bos_token_id) else []
        return first + ids[len(ids) - self._most + len(first) :]

    def _scores(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """Returns the scores of rows that go through the model together."""
        import torch

        pad = self._config.pad_token_id
        if pad is None:  # a decoder looks for the last token that is no padding: take one that is not in the text
            used = set[int]().union(*rows)
            pad = next(unused for unused in range(self._config.vocab_size) if unused not in used)
        longest = max(map(len, rows))
        ids = torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        device, declared = self._model.device, self._config.pad_token_id
        self._config.pad_token_id = pad
        try:
            with torch.inference_mode():
                logits: Tensor = self._model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits  # [B, 1]
                return logits[:, 0].float().tolist()
        finally:
            self._config.pad_token_id = declared


def folder_of(settings: RewardModelArgs) -> Path:
    """Returns the folder of the model, after downloading it if need be. Raises RewardError if there is none."""
    if Path(settings.path).is_dir():
        return Path(settings.path)
    if settings.path.startswith("/"):
        raise RewardError(f"rewards: reward_model: there is no folder {settings.path}")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(settings.path, revision=settings.revision, allow_patterns=list(FILES)))
    except (OSError, ValueError) as error:  # the hub's own errors are such
        said = " ".join(str(error).split())[:300]
        raise RewardError(f"rewards: reward_model: the hub has no {settings.path}: {type(error).__name__}: {said}") from error


def model_digest(folder: Path) -> str:
    """Returns the SHA-256 of the names and bytes of a model's files."""
    made = hashlib.sha256()
    for path in sorted({path for pattern in FILES for path in folder.glob(pattern)}):
        made.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: made)  # goes on with `made`
    return made.hexdigest()


def load_parts(folder: Path, settings: RewardModelArgs) -> "tuple[PreTrainedTokenizerBase, PreTrainedModel]":
    """Returns tokenizer and model. Raises RewardError if they cannot be loaded, or give more or less than one score."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    where = f"rewards: reward_model: {settings.path}"
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = settings.device or (f"cuda:{local}" if torch.cuda.is_available() else "cpu")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        model, info = AutoModelForSequenceClassification.from_pretrained(
            folder, dtype=settings.dtype, trust_remote_code=False, use_safetensors=True, output_loading_info=True
        )
        model = model.to(device).eval()
    except (OSError, ValueError, RuntimeError) as error:
        raise RewardError(f"{where} cannot be loaded: {' '.join(str(error).split())[:500]}") from error
    model.config.use_cache = False
    if missing := sorted(info["missing_keys"]):
        raise RewardError(f"{where} has no weights for {', '.join(missing[:3])}, which would be random: it is no reward model")
    if model.config.num_labels != 1:
        raise RewardError(f"{where} has {model.config.num_labels} labels; a reward model has one, which is its score")
    if settings.chat and not tokenizer.chat_template:
        raise RewardError(f"{where} has no chat template; set args.chat to false, which gives it the text that the policy sees")
    head = model._modules.get("score")
    if isinstance(head, torch.nn.Linear):  # of most decoders: in bfloat16 scores of 5.01 and 5.02 would be the same
        head.float()
        head.register_forward_pre_hook(lambda _, inputs: (inputs[0].float(),))
    return tokenizer, model


def limit_memory(further: int) -> None:
    """Limits this process to `further` bytes beyond what it uses now. Does nothing where there is no /proc."""
    status = Path("/proc/self/status")
    if not status.exists():
        return
    (used,) = (int(line.split()[1]) << 10 for line in status.read_text().splitlines() if line.startswith("VmData:"))
    resource.setrlimit(resource.RLIMIT_DATA, (used + further, used + further))


def batches(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Returns the places of rows of similar lengths, in batches of at most `most` tokens with padding, or of one longer row."""
    made: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lambda place: lengths[place], reverse=True):
        if made and lengths[made[-1][0]] * (len(made[-1]) + 1) <= most:
            made[-1].append(place)
        else:
            made.append([place])
    return made


def sigmoid(value: float) -> float:
    """Returns 1 / (1 + e^-value), without overflow."""
    return 1.0 / (1.0 + exp(-value)) if value >= 0 else exp(value) / (1.0 + exp(value))
