"""Train a head: read, prepare, repeat small steps until the budget is spent, save."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from autotune.demo.training.batches import Batch, SlotMaker, collate
from autotune.demo.training.drafter import Drafter, DrafterShape
from autotune.demo.training.fitting import Budget, accuracy_by_depth, fit
from autotune.demo.training.samples import (
    DraftVocabulary,
    Sample,
    choose_vocabulary,
    coverage,
    read_samples,
)
from autotune.demo.training.save import prepare_folder, save_head
from autotune.demo.training.spec import HeadSpec, check_spec, default_aux_layers
from autotune.demo.training.start import copy_output_rows, start_from_head, start_from_target
from autotune.demo.training.target import auxiliary_states, load_target
from autotune.errors import invalid

STEPS_BETWEEN_REPORTS = 100
HELD_OUT_SEED = 1
"""Anchors of held-out samples are drawn alike every time, so that accuracies compare."""

Report = Callable[[str], None]


@dataclass(frozen=True)
class TrainingOptions:
    """Everything a training run is told; what a head is defaults to the head that ships."""

    target_dir: Path
    answer_files: tuple[Path, ...]
    out_dir: Path
    init_dir: Path | None = None
    """A head to continue from; `None` starts from the target's own layers."""
    num_layers: int = 3
    draft_vocab_size: int = 4096
    depth: int = 8
    mask_token_id: int = 4
    aux_layer_ids: tuple[int, ...] = ()
    """Empty means `spec.default_aux_layers`."""
    anchors_per_sample: int = 20
    max_length: int = 256
    """Tokens of a sample, prompt and answer together."""
    num_held_out: int = 40
    """Samples that are only used to measure accuracy."""
    batch_size: int = 4
    learning_rate: float = 1e-3
    minutes: float = 30.0
    max_steps: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class Material:
    """Samples and what the target says about them; one list entry for each sample."""

    samples: list[Sample]
    features: list[Tensor]
    maker: SlotMaker

    def batch(self, indices: Sequence[int], rng: Random) -> Batch:
        """Return the samples at these indices, with freshly drawn anchors."""
        drawn = [(s, self.maker.draw_anchors(s, rng)) for s in (self.samples[i] for i in indices)]
        slots = [self.maker.slots(sample, anchors) for sample, anchors in drawn]
        return collate(slots, [self.features[i] for i in indices])


def train_head(options: TrainingOptions, report: Report) -> list[float]:
    """Train a head and save it in the layout vLLM loads.

    Args:
        options: what to train, on what, for how long.
        report: called with lines of progress.

    Returns:
        The accuracy on held-out samples for every depth, see `accuracy_by_depth`.

    Raises:
        InputError: something in the options cannot be used; before any training.
    """
    torch.manual_seed(options.seed)
    rng = Random(options.seed)
    target = load_target(options.target_dir)
    spec = head_spec(options, target)
    samples = _read_shuffled(options, target.config.vocab_size, rng)
    vocabulary = choose_vocabulary(samples, spec.draft_vocab_size, target.config.vocab_size)
    report(_describe(samples, vocabulary))
    prepare_folder(options.out_dir)
    drafter, features = _prepare(options, spec, target, samples, vocabulary)
    maker = SlotMaker(vocabulary, spec.mask_token_id, spec.depth, options.anchors_per_sample)
    material = Material(samples, features, maker)
    _fit_with_reports(drafter, material, options, rng, report)
    save_head(drafter, vocabulary, spec, options.target_dir, options.out_dir)
    accuracy = held_out_accuracy(drafter, material, options)
    report(f"saved in {options.out_dir}; held-out accuracy by depth: {_short(accuracy)}")
    return accuracy


def head_spec(options: TrainingOptions, target: LlamaForCausalLM) -> HeadSpec:
    """Return the head these options ask for, once it is known to fit the target."""
    layers = options.aux_layer_ids or default_aux_layers(target.config.num_hidden_layers)
    spec = HeadSpec(
        num_layers=options.num_layers,
        draft_vocab_size=options.draft_vocab_size,
        depth=options.depth,
        mask_token_id=options.mask_token_id,
        aux_layer_ids=layers,
    )
    check_spec(spec, target.config, options.target_dir)
    return spec


def endless_batches(
    material: Material, first: int, batch_size: int, rng: Random
) -> Iterator[Batch]:
    """Yield batches of all samples from `first` on, in a new order every time round.

    Samples that do not fill a last batch wait for the next round.
    """
    indices = list(range(first, len(material.samples)))
    while True:
        rng.shuffle(indices)
        for start in range(0, max(1, len(indices) - batch_size + 1), batch_size):
            yield material.batch(indices[start : start + batch_size], rng)


def held_out_accuracy(
    drafter: Drafter, material: Material, options: TrainingOptions
) -> list[float]:
    """Return `accuracy_by_depth` on the samples that training never sees."""
    rng, size = Random(HELD_OUT_SEED), options.batch_size
    indices = range(options.num_held_out)
    starts = range(0, len(indices), size)
    batches = (material.batch(indices[start : start + size], rng) for start in starts)
    return accuracy_by_depth(drafter, batches, options.depth)


def _read_shuffled(options: TrainingOptions, vocab_size: int, rng: Random) -> list[Sample]:
    """Return the samples in random order, so that the held-out ones come from all files."""
    samples = read_samples(options.answer_files, options.max_length, vocab_size)
    if len(samples) <= options.num_held_out:
        raise invalid(
            f"must hold more than {options.num_held_out} answers, the number held out",
            where=", ".join(map(str, options.answer_files)),
            got=len(samples),
            next_step="Add answers, or lower --held-out.",
        )
    rng.shuffle(samples)
    return samples


def _prepare(
    options: TrainingOptions,
    spec: HeadSpec,
    target: LlamaForCausalLM,
    samples: Sequence[Sample],
    vocabulary: DraftVocabulary,
) -> tuple[Drafter, list[Tensor]]:
    """Return the drafter before its first step, and the target's states of every sample."""
    shape = DrafterShape.of(spec, target.config)
    drafter = Drafter(shape, target.model.embed_tokens.weight)
    copy_output_rows(drafter, target, vocabulary)
    if options.init_dir is not None:  # first, since the states below take minutes
        start_from_head(drafter, options.init_dir, spec)
    features = [auxiliary_states(target, s.tokens, spec.aux_layer_ids) for s in samples]
    if options.init_dir is None:
        start_from_target(drafter, target, features, first_layer=spec.aux_layer_ids[-1])
    return drafter, features


def _fit_with_reports(
    drafter: Drafter, material: Material, options: TrainingOptions, rng: Random, report: Report
) -> None:
    smooth_loss = math.nan

    def on_step(step: int, loss: float) -> None:
        nonlocal smooth_loss
        smooth_loss = loss if step == 1 else 0.98 * smooth_loss + 0.02 * loss
        if step % STEPS_BETWEEN_REPORTS == 0:
            accuracy = _short(held_out_accuracy(drafter, material, options))
            report(f"step {step}: loss {smooth_loss:.3f}, held-out accuracy {accuracy}")

    batches = endless_batches(material, options.num_held_out, options.batch_size, rng)
    budget = Budget(options.minutes, options.max_steps)
    num_steps = fit(drafter, batches, budget, options.learning_rate, on_step)
    report(f"{num_steps} steps, loss {smooth_loss:.3f}")


def _describe(samples: Sequence[Sample], vocabulary: DraftVocabulary) -> str:
    num_tokens = sum(len(sample.tokens) for sample in samples)
    share = coverage(samples, vocabulary)
    return (
        f"{len(samples)} samples, {num_tokens} tokens; the draft vocabulary of "
        f"{len(vocabulary)} tokens covers {share:.1%} of the answers"
    )


def _short(accuracy: Sequence[float]) -> str:
    return " ".join(f"{value:.2f}" for value in accuracy)
