"""Let the target answer prompts, so that the drafter learns to foresee the target itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from autotune.demo.training.jsonl import numbered_objects
from autotune.demo.training.target import load_target
from autotune.errors import invalid


@dataclass(frozen=True)
class AnswerOptions:
    """What `write_answers` needs to know."""

    target_dir: Path
    prompt_files: tuple[Path, ...]
    out_file: Path
    """JSONL to write; must not exist yet."""
    max_new_tokens: int = 256
    batch_size: int = 8


def write_answers(options: AnswerOptions, report: Callable[[str], None]) -> int:
    """Answer every prompt greedily and write one line of token ids for each.

    Greedy, because that is what the head is meant to foresee: sampled text holds many tokens that
    the target itself finds unlikely. Lines are written batch by batch, so a run that is cut off
    leaves complete lines.

    Args:
        options: where the prompts are and where the answers go.
        report: called with a line of progress after every batch.

    Returns:
        The number of lines written.
    """
    prompts = read_prompts(options.prompt_files)
    tokenizer = load_tokenizer(options.target_dir)
    prompt_ids = [encode_chat(tokenizer, prompt) for prompt in prompts]
    with _open_new(options.out_file) as out:
        target = load_target(options.target_dir)
        for start in range(0, len(prompt_ids), options.batch_size):
            batch = prompt_ids[start : start + options.batch_size]
            _write_batch(out, batch, greedy_answers(target, batch, options.max_new_tokens))
            report(f"{start + len(batch)} of {len(prompt_ids)} prompts answered")
    return len(prompt_ids)


def read_prompts(paths: Sequence[Path]) -> list[str]:
    """Return the `prompt` of every line of every JSONL file; other keys are left alone."""
    prompts = []
    for path in paths:
        for where, row in numbered_objects(path):
            prompt = row.get("prompt")
            if not isinstance(prompt, str) or not prompt.strip():
                raise invalid("must be a text", where=where, key_path="prompt", got=prompt)
            prompts.append(prompt)
    if not prompts:
        raise invalid("must hold at least one prompt", where=", ".join(map(str, paths)))
    return prompts


def load_tokenizer(folder: Path) -> Any:
    """Return the target's tokenizer, which must know how to lay out a chat."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        rule = "must hold a tokenizer that transformers can load"
        raise invalid(rule, where=folder) from error
    if not tokenizer.chat_template:
        raise invalid("must have a chat template", where=folder, key_path="tokenizer")
    return tokenizer


def encode_chat(tokenizer: Any, prompt: str) -> list[int]:
    """Return the token ids of a chat in which the user has just sent `prompt`.

    This is the text that vLLM's chat endpoint builds, so the head meets it again in service.
    """
    chat = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    # The template has written the special tokens already.
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def greedy_answers(
    target: LlamaForCausalLM, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> list[list[int]]:
    """Return the greedy continuation of every prompt, up to and with its end token.

    Args:
        target: the model that answers.
        prompts: token ids, at least one for each prompt; lengths may differ.
        max_new_tokens: where an answer without an end token is cut.
    """
    width = max(map(len, prompts))
    # On the left, so that every prompt ends where its answer begins.
    padding = [width - len(prompt) for prompt in prompts]
    input_ids = [[0] * n + list(prompt) for n, prompt in zip(padding, prompts, strict=True)]
    is_token = [[0] * n + [1] * (width - n) for n in padding]
    output = _generate(target, torch.tensor(input_ids), torch.tensor(is_token), max_new_tokens)
    ends = end_tokens(target)
    return [_until_end(answer[width:], ends) for answer in output]


def end_tokens(target: LlamaForCausalLM) -> set[int]:
    """Return the ids after which the target stops; empty when it names none."""
    ends: int | list[int] | None = target.generation_config.eos_token_id
    if ends is None:
        return set()
    return {ends} if isinstance(ends, int) else set(ends)


def _generate(
    target: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, max_new_tokens: int
) -> list[list[int]]:
    output: torch.Tensor = target.generate(
        input_ids,
        attention_mask=attention_mask,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=0,  # never read: `_until_end` cuts it off, and the mask hides it
    )
    rows: list[list[int]] = output.tolist()
    return rows


def _until_end(answer: list[int], ends: Collection[int]) -> list[int]:
    for i, token in enumerate(answer):
        if token in ends:
            # The end token stays: drafting it right saves the last step of an answer.
            return answer[: i + 1]
    return answer


def _write_batch(
    out: TextIO, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> None:
    pairs = zip(prompts, answers, strict=True)
    rows = ({"prompt_ids": list(prompt), "output_ids": list(answer)} for prompt, answer in pairs)
    out.writelines(json.dumps(row) + "\n" for row in rows)
    out.flush()


def _open_new(path: Path) -> TextIO:
    try:
        return path.open("x", encoding="utf-8")
    except OSError as error:
        raise invalid(
            f"must be a new file in an existing folder ({error.strerror})", where=path
        ) from error
