"""Training of a P-EAGLE head, on a random Llama so small that all of it takes seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

REASON = "training a head needs the packages of the demo: torch, transformers, safetensors"
torch = pytest.importorskip("torch", reason=REASON)
transformers = pytest.importorskip("transformers", reason=REASON)
safetensors_torch = pytest.importorskip("safetensors.torch", reason=REASON)

from click.testing import CliRunner, Result  # noqa: E402

from autotune.demo.training.__main__ import cli  # noqa: E402
from autotune.demo.training.answers import greedy_answers  # noqa: E402
from autotune.demo.training.batches import Batch, SlotMaker, collate  # noqa: E402
from autotune.demo.training.drafter import Drafter, DrafterShape  # noqa: E402
from autotune.demo.training.fitting import (  # noqa: E402
    Budget,
    accuracy_by_depth,
    fit,
    loss_of,
    rate_ratio,
)
from autotune.demo.training.samples import (  # noqa: E402
    IGNORED,
    DraftVocabulary,
    Sample,
    choose_vocabulary,
    cut,
)
from autotune.demo.training.spec import HeadSpec  # noqa: E402
from autotune.demo.training.start import copy_output_rows, start_from_target  # noqa: E402
from autotune.demo.training.target import auxiliary_states, load_target  # noqa: E402

SPEC = HeadSpec(
    num_layers=2, draft_vocab_size=16, depth=4, mask_token_id=63, aux_layer_ids=(1, 3, 5)
)
CYCLE = [5, 9, 13, 17]
"""Every answer goes round and round these tokens, so each is known from the one before."""

# The four tokens of the cycle and the twelve smallest other ids: 0 to 14 without a gap, and 17.
CYCLE_VOCABULARY = (*range(15), 17)


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.2,  # Llama's 0.02 would leave so narrow a model almost silent
        bos_token_id=None,
        eos_token_id=None,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def target(target_dir: Path) -> Any:
    return load_target(target_dir)


@pytest.fixture(scope="module")
def answer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("answers") / "answers.jsonl"
    rng = Random(1)
    rows = [
        {
            "prompt_ids": [rng.randrange(18, 60) for _ in range(6)],
            "output_ids": [CYCLE[(i + start) % 4] for i in range(30)],
        }
        for start in range(12)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def fresh_drafter(target: Any, vocabulary: DraftVocabulary, features: list[Any]) -> Drafter:
    torch.manual_seed(1)
    drafter = Drafter(DrafterShape.of(SPEC, target.config), target.model.embed_tokens.weight)
    copy_output_rows(drafter, target, vocabulary)
    start_from_target(drafter, target, features, first_layer=5)
    return drafter


# --- slots -------------------------------------------------------------------------------------


def test_slots_read_and_say_the_right_tokens() -> None:
    # x = 20 21 20 | 21 22 23 21, three tokens of prompt; the vocabulary lacks 22.
    sample = Sample((20, 21, 20, 21, 22, 23, 21), num_prompt_tokens=3)
    maker = SlotMaker(
        DraftVocabulary([20, 21, 23]), mask_token_id=63, depth=3, anchors_per_sample=9
    )

    slots = maker.slots(sample, anchors=[2, 3])

    # Real slot t reads x[t+1] and says x[t+2]; draft ids are 20 -> 0, 21 -> 1, 23 -> 2.
    #   t = 0: says x[2] = 20, which belongs to the prompt         -> ignored
    #   t = 1: x[3] = 21 -> 1      t = 2: x[4] = 22, not drafted    -> ignored
    #   t = 3: x[5] = 23 -> 2      t = 4: x[6] = 21 -> 1            t = 5: nothing left
    # Mask slot k of anchor t says x[t+2+k]:
    #   anchor 2: k = 1 says x[5] = 23 -> 2, k = 2 says x[6] = 21 -> 1
    #   anchor 3: k = 1 says x[6] = 21 -> 1, k = 2 has nothing left and is not made
    assert slots.token_ids == [21, 20, 21, 22, 23, 21, 63, 63, 63]
    assert slots.positions == [0, 1, 2, 3, 4, 5, 3, 4, 4]
    assert slots.labels == [-100, 1, -100, 2, 1, -100, 2, 1, 1]
    assert slots.depths == [0, 0, 0, 0, 0, 0, 1, 2, 1]
    # The last prompt position is the first anchor; from position 4 there is one token to say.
    assert maker.draw_anchors(sample, Random(0)) == [2, 3, 4]


def test_attention_follows_the_rule_of_parallel_drafting() -> None:
    # Six tokens make real slots R0..R4. Depth 3 gives anchor 1 the mask slots A2 and A3 (named
    # after their positions) and anchor 2 only B3, since it runs into the end.
    sample = Sample((1, 2, 3, 4, 5, 6), num_prompt_tokens=1)
    maker = SlotMaker(DraftVocabulary(range(8)), mask_token_id=7, depth=3, anchors_per_sample=9)
    longer = Sample(tuple(range(1, 8)) + (1, 2), num_prompt_tokens=1)  # eight real slots
    features = [torch.ones(6, 4), torch.ones(9, 4)]

    batch = collate([maker.slots(sample, [1, 2]), maker.slots(longer, [0])], features)

    expected = [
        # R0 R1 R2 R3 R4 A2 A3 B3 | two columns of padding: the longer sample has 8 + 2 slots
        [1, 0, 0, 0, 0, 0, 0, 0, 0, 0],  # R0 real slots see real slots up to themselves
        [1, 1, 0, 0, 0, 0, 0, 0, 0, 0],  # R1
        [1, 1, 1, 0, 0, 0, 0, 0, 0, 0],  # R2
        [1, 1, 1, 1, 0, 0, 0, 0, 0, 0],  # R3
        [1, 1, 1, 1, 1, 0, 0, 0, 0, 0],  # R4
        [1, 1, 0, 0, 0, 1, 0, 0, 0, 0],  # A2 sees R0 and R1, up to its anchor, and itself
        [1, 1, 0, 0, 0, 1, 1, 0, 0, 0],  # A3 sees A2 as well, but not B3 at its own position
        [1, 1, 1, 0, 0, 0, 0, 1, 0, 0],  # B3 has the anchor 2: R0 to R2, and itself
        [0, 0, 0, 0, 0, 0, 0, 0, 1, 0],  # padding sees itself alone
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 1],
    ]
    assert batch.allowed[0, 0].int().tolist() == expected
    # Five real slots carry a state of the target; the sixth token's state is not used.
    assert batch.features[0, :, 0].tolist() == [1, 1, 1, 1, 1, 0, 0, 0, 0, 0]
    assert batch.labels[0, 8:].tolist() == [IGNORED, IGNORED]


def test_training_sees_what_vllm_will_compute(target: Any) -> None:
    # vLLM drafts from anchor 4 with the tokens up to 5 alone: real slots 0..4, then mask slots,
    # all causal. Training must arrive at the same states from the whole sequence at once.
    tokens = tuple(Random(3).sample(range(60), 14))
    vocabulary = DraftVocabulary(range(16))
    states = auxiliary_states(target, tokens, SPEC.aux_layer_ids)
    drafter = fresh_drafter(target, vocabulary, [states])
    maker = SlotMaker(vocabulary, mask_token_id=63, depth=4, anchors_per_sample=9)
    batch = collate([maker.slots(Sample(tokens, 1), [2, 4, 6])], [states])

    trained = run(drafter, batch)[0]
    served = drafter(
        torch.tensor([[*tokens[1:6], 63, 63, 63]]),
        torch.cat([states[:5].float(), drafter.mask_hidden.expand(3, 96)])[None],
        torch.zeros(1, 8, dtype=torch.bool),
        torch.arange(8)[None],
        torch.ones(8, 8, dtype=torch.bool).tril()[None, None],
    )[0]

    # 13 real slots, three mask slots of anchor 2, then the three of anchor 4.
    torch.testing.assert_close(trained[:5], served[:5])
    torch.testing.assert_close(trained[16:19], served[5:8])


def run(drafter: Drafter, batch: Batch) -> Any:
    return drafter(batch.token_ids, batch.features, batch.is_mask, batch.positions, batch.allowed)


def test_auxiliary_states_are_the_inputs_of_the_named_layers(target: Any) -> None:
    seen: dict[int, Any] = {}
    hooks = [
        target.model.layers[i].register_forward_pre_hook(
            lambda module, inputs, i=i: seen.update({i: inputs[0][0]})
        )
        for i in (1, 3, 5)
    ]
    states = auxiliary_states(target, [4, 8, 15, 16, 23], [1, 3, 5])
    for hook in hooks:
        hook.remove()
    assert states.shape == (5, 96)
    for column, layer in enumerate([1, 3, 5]):
        part = states[:, 32 * column : 32 * (column + 1)]
        assert torch.equal(part, seen[layer].to(torch.bfloat16))


# --- samples -----------------------------------------------------------------------------------


def test_cutting_keeps_the_answer_and_the_end_of_the_prompt() -> None:
    assert cut([1, 2, 3, 4], [5, 6, 7], max_length=5) == Sample((3, 4, 5, 6, 7), 2)
    assert cut([1, 2, 3, 4], [5, 6, 7], max_length=3) == Sample((5, 6, 7), 0)
    assert cut([1, 2], [5, 6, 7], max_length=9) == Sample((1, 2, 5, 6, 7), 2)


def test_the_draft_vocabulary_is_frequent_answer_tokens_then_small_ids() -> None:
    # Prompt tokens (8, 8, 8) do not count. In the answers 9 comes three times, 4 twice, 7 once.
    samples = [Sample((8, 8, 8, 9, 9, 4), 3), Sample((9, 4, 7), 0)]
    vocabulary = choose_vocabulary(samples, size=4, vocab_size=64)
    assert vocabulary.target_ids == (0, 4, 7, 9)
    assert vocabulary.offsets() == [0, 3, 5, 6]
    assert choose_vocabulary(samples, size=2, vocab_size=64).target_ids == (4, 9)


# --- fitting -----------------------------------------------------------------------------------


def test_loss_falls_on_a_predictable_sequence(target: Any) -> None:
    vocabulary = DraftVocabulary(CYCLE_VOCABULARY)
    sample = Sample((40, 41, *(CYCLE * 8)), num_prompt_tokens=2)
    states = auxiliary_states(target, sample.tokens, SPEC.aux_layer_ids)
    drafter = fresh_drafter(target, vocabulary, [states])
    frozen = drafter.lm_head.weight.clone()
    maker = SlotMaker(vocabulary, mask_token_id=63, depth=4, anchors_per_sample=8)
    batch = collate([maker.slots(sample, range(2, 10))], [states])
    losses: list[float] = []

    num_steps = fit(
        drafter,
        iter([batch] * 31),
        Budget(minutes=5, max_steps=30),
        3e-2,
        lambda step, loss: losses.append(loss),
    )

    assert num_steps == len(losses) == 30
    assert losses[-1] < 0.25 * losses[0]
    assert min(accuracy_by_depth(drafter, iter([batch]), depth=4)) > 0.7  # one in four by chance
    assert torch.equal(drafter.lm_head.weight, frozen)
    # Only the first layer reads its hidden_norm; the others' exist for vLLM and stay at ones.
    assert torch.equal(drafter.layers[1].hidden_norm.weight, torch.ones(32))


def test_accuracy_counts_every_depth_by_itself(target: Any) -> None:
    # The labels of depth 0 and 1 are whatever the drafter says, those of depth 2 are not.
    vocabulary = DraftVocabulary(range(16))
    sample = Sample(tuple(range(10)), num_prompt_tokens=1)
    states = auxiliary_states(target, sample.tokens, SPEC.aux_layer_ids)
    drafter = fresh_drafter(target, vocabulary, [states])
    maker = SlotMaker(vocabulary, mask_token_id=63, depth=3, anchors_per_sample=4)
    batch = collate([maker.slots(sample, [0, 1, 2, 3])], [states])
    with torch.autocast("cpu", torch.bfloat16):
        said = drafter.lm_head(run(drafter, batch)).argmax(dim=-1)
    labels = torch.where(batch.depths < 2, said, (said + 1) % 16)
    labels[0, :4] = IGNORED

    accuracy = accuracy_by_depth(drafter, iter([replace(batch, labels=labels)]), depth=3)

    assert accuracy == [1.0, 1.0, 0.0]


def test_a_batch_without_labels_teaches_nothing_and_breaks_nothing(target: Any) -> None:
    vocabulary = DraftVocabulary([60])
    sample = Sample(tuple(range(10)), num_prompt_tokens=1)
    states = auxiliary_states(target, sample.tokens, SPEC.aux_layer_ids)
    drafter = fresh_drafter(target, DraftVocabulary(range(16)), [states])
    maker = SlotMaker(vocabulary, mask_token_id=63, depth=3, anchors_per_sample=4)
    loss = loss_of(drafter, collate([maker.slots(sample, [1])], [states]))
    loss.backward()
    assert loss.item() == 0.0
    assert drafter.fc.weight.grad.abs().max() == 0.0


def test_the_learning_rate_warms_up_and_then_falls() -> None:
    # 50 steps of warm-up; at half the budget the cosine stands at 0.5: 0.05 + 0.95 * 0.5.
    assert rate_ratio(0, 0.0) == pytest.approx(1 / 50)
    assert rate_ratio(49, 0.0) == pytest.approx(1.0)
    assert rate_ratio(500, 0.5) == pytest.approx(0.525)
    assert rate_ratio(1000, 1.0) == pytest.approx(0.05)


def test_the_budget_is_time_or_steps_whichever_ends_first() -> None:
    assert Budget(minutes=2).spent_ratio(elapsed_s=30, num_steps=999) == pytest.approx(0.25)
    assert Budget(minutes=2, max_steps=10).spent_ratio(30, 5) == pytest.approx(0.5)
    assert Budget(minutes=2, max_steps=10).spent_ratio(500, 5) == 1.0


# --- the commands ------------------------------------------------------------------------------


def train(*arguments: object) -> Result:
    shape = ["--layers", 2, "--draft-vocab", 16, "--depth", 4, "--mask-token", 63]
    small = ["--held-out", 2, "--anchors", 4, "--max-length", 40, "--max-steps", 3]
    command = ["train", *shape, *small, "--aux-layers", "1,3,5", *arguments]
    return CliRunner().invoke(cli, [str(argument) for argument in command])


@pytest.fixture(scope="module")
def head_dir(
    target_dir: Path, answer_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "head"
    result = train(answer_file, "--target", target_dir, "--out", folder, "--learning-rate", 0.5)
    assert result.exit_code == 0, result.output
    return folder


def test_the_saved_folder_is_what_vllm_loads(head_dir: Path) -> None:
    assert sorted(path.name for path in head_dir.iterdir()) == ["config.json", "model.safetensors"]
    tensors = safetensors_torch.load_file(head_dir / "model.safetensors")
    # Hidden size 32, MLP 48, 4 heads and 2 KV heads of 8 channels: queries 4 * 8 = 32, keys and
    # values 2 * 8 = 16. Layer 0 reads embedding and state, 2 * 32 = 64; fc three states, 96.
    common = {
        "self_attn.o_proj.weight": (32, 32),
        "mlp.gate_proj.weight": (48, 32),
        "mlp.up_proj.weight": (48, 32),
        "mlp.down_proj.weight": (32, 48),
        "input_layernorm.weight": (32,),
        "post_attention_layernorm.weight": (32,),
        "hidden_norm.weight": (32,),
    }
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        **{f"layers.{i}.{name}": shape for i in (0, 1) for name, shape in common.items()},
        "layers.0.self_attn.q_proj.weight": (32, 64),
        "layers.0.self_attn.k_proj.weight": (16, 64),
        "layers.0.self_attn.v_proj.weight": (16, 64),
        "layers.1.self_attn.q_proj.weight": (32, 32),
        "layers.1.self_attn.k_proj.weight": (16, 32),
        "layers.1.self_attn.v_proj.weight": (16, 32),
        "fc.weight": (32, 96),
        "norm.weight": (32,),
        "lm_head.weight": (16, 32),
        "mask_hidden": (1, 96),
        "d2t": (16,),
    }
    # Draft ids 0 to 14 are the target's own; draft id 15 is token 17, two further on.
    assert tensors["d2t"].tolist() == [0] * 15 + [2]
    assert tensors["d2t"].dtype == torch.int64
    del tensors["d2t"]
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


def test_the_output_layer_is_the_targets_own_rows(head_dir: Path, target: Any) -> None:
    tensors = safetensors_torch.load_file(head_dir / "model.safetensors")
    rows = target.lm_head.weight[list(CYCLE_VOCABULARY)].to(torch.bfloat16)
    assert torch.equal(tensors["lm_head.weight"], rows)


def test_the_saved_config_is_what_vllm_reads(head_dir: Path) -> None:
    config = json.loads((head_dir / "config.json").read_text(encoding="utf-8"))
    expected = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "target_hidden_size": 32,
        "vocab_size": 64,
        "draft_vocab_size": 16,
        "ptd_token_id": 63,
        "tie_word_embeddings": False,
        "num_parallel_draft_tokens": 4,
    }
    assert {key: config.get(key) for key in expected} == expected
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]


def test_a_whole_vocabulary_needs_no_map(
    target_dir: Path, answer_file: Path, tmp_path: Path
) -> None:
    result = train(answer_file, "--target", target_dir, "--out", tmp_path, "--draft-vocab", 64)
    assert result.exit_code == 0, result.output
    tensors = safetensors_torch.load_file(tmp_path / "model.safetensors")
    assert tensors["lm_head.weight"].shape == (64, 32)
    assert "d2t" not in tensors  # vLLM has no place for it and would refuse the file


def test_init_continues_from_the_same_parameters(
    head_dir: Path, target_dir: Path, answer_file: Path, tmp_path: Path
) -> None:
    # A rate so small that float32 cannot take the step: what comes out is what went in.
    result = train(
        answer_file,
        "--target",
        target_dir,
        "--out",
        tmp_path,
        "--init",
        head_dir,
        "--learning-rate",
        1e-30,
    )
    assert result.exit_code == 0, result.output
    before = safetensors_torch.load_file(head_dir / "model.safetensors")
    after = safetensors_torch.load_file(tmp_path / "model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name


def test_bad_input_is_explained(target_dir: Path, answer_file: Path, tmp_path: Path) -> None:
    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_bytes(text.encode("latin-1"))
        return path

    good = json.dumps({"prompt_ids": [1], "output_ids": CYCLE * 8})
    foreign = json.dumps({"prompt_ids": [1], "output_ids": [64] * 30})
    for answers, expected in [
        (tmp_path / "absent.jsonl", "absent.jsonl: must be a readable file"),
        (tmp_path, "must be a readable file"),
        (write("broken.jsonl", f"{good}\n\n{{oops\n"), "broken.jsonl:3: must be JSON"),
        (write("list.jsonl", "[1]\n"), "list.jsonl:1: must be a JSON object"),
        (write("keys.jsonl", '{"p": [1]}\n'), "keys.jsonl:1: prompt_ids: must be a list of"),
        (write("foreign.jsonl", foreign), "foreign.jsonl:1: output_ids: token ids must be from"),
        (write("latin.jsonl", '{"prompt_ids": "\xe9"}'), "latin.jsonl: must be UTF-8"),
        (write("empty.jsonl", ""), "at least one answer of 24 tokens"),
        (write("few.jsonl", f"{good}\n{good}\n"), "must hold more than 2 answers"),
    ]:
        result = train(answers, "--target", target_dir, "--out", tmp_path / "head")
        assert_explained(result, expected)
    assert not (tmp_path / "head").exists()


def assert_explained(result: Result, expected: str) -> None:
    assert expected in result.stderr
    assert result.exit_code == 2
    assert result.exception is None or isinstance(result.exception, SystemExit)


def test_options_that_do_not_fit_the_target_are_explained(
    head_dir: Path, target_dir: Path, answer_file: Path, tmp_path: Path
) -> None:
    wrong_kind = tmp_path / "gpt2"
    wrong_kind.mkdir()
    (wrong_kind / "config.json").write_text('{"model_type": "gpt2"}', encoding="utf-8")
    common = [answer_file, "--out", tmp_path / "head"]
    for arguments, expected in [
        (["--target", tmp_path], "must be a folder with a model and its config.json"),
        (["--target", wrong_kind], "model_type: must be a model of type llama, but got 'gpt2'"),
        # vLLM's default for six layers is 2, 6 // 2 = 3 and 6 - 3 = 3, which fails when serving.
        (["--target", target_dir, "--aux-layers", ""], "must be different numbers from 0 to 5"),
        (["--target", target_dir, "--aux-layers", "1,6"], "must be different numbers from 0 to 5"),
        (["--target", target_dir, "--aux-layers", "one"], "must be numbers such as 2,15,27"),
        (["--target", target_dir, "--mask-token", 64], "the mask token must be below the 64"),
        (["--target", target_dir, "--draft-vocab", 65], "must have at most the target's 64"),
        (["--target", target_dir, "--init", tmp_path], "must be part of a P-EAGLE head"),
        (
            ["--target", target_dir, "--init", head_dir, "--layers", 1],
            "num_hidden_layers: must be 1, as in the head to train, but got 2",
        ),
    ]:
        assert_explained(train(*common, *arguments), expected)


def test_a_head_for_another_target_is_explained(
    head_dir: Path, target_dir: Path, answer_file: Path, tmp_path: Path
) -> None:
    tensors = safetensors_torch.load_file(head_dir / "model.safetensors")
    (tmp_path / "config.json").write_bytes((head_dir / "config.json").read_bytes())
    common = [answer_file, "--target", target_dir, "--out", tmp_path / "new", "--init", tmp_path]

    wide = {**tensors, "norm.weight": torch.ones(40)}
    safetensors_torch.save_file(wide, tmp_path / "model.safetensors")
    assert_explained(train(*common), "norm.weight: must have the shape (32,), but got (40,)")

    del tensors["mask_hidden"]
    safetensors_torch.save_file(tensors, tmp_path / "model.safetensors")
    assert_explained(train(*common), "mask_hidden: must be in the head")

    (tmp_path / "model.safetensors").write_bytes(b"not a tensor in sight")
    assert_explained(train(*common), "must be part of a P-EAGLE head")


# --- answers -----------------------------------------------------------------------------------


def greedy_by_hand(target: Any, prompt: list[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(target(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_a_batch_of_prompts_is_answered_as_if_each_were_alone(target: Any) -> None:
    prompts = [[11, 30, 45, 8, 52], [7, 19], [33, 2, 58]]
    by_hand = [greedy_by_hand(target, prompt, 6) for prompt in prompts]
    assert greedy_answers(target, prompts, max_new_tokens=6) == by_hand


def test_an_answer_ends_with_its_end_token(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [[11, 30, 45, 8, 52], [7, 19]]
    first, second = (greedy_by_hand(target, prompt, 6) for prompt in prompts)
    end = first[2]
    monkeypatch.setattr(target.generation_config, "eos_token_id", [end])
    cut_second = second[: second.index(end) + 1] if end in second else second
    answers = greedy_answers(target, prompts, max_new_tokens=6)
    assert answers == [first[: first.index(end) + 1], cut_second]


@pytest.fixture
def chat_target_dir(target_dir: Path, tmp_path: Path) -> Path:
    """The tiny target with a tokenizer of five words, whose chats read `user ... bot`."""
    tokenizers = pytest.importorskip("tokenizers", reason=REASON)
    folder = tmp_path / "chat-target"
    folder.mkdir()
    for path in target_dir.iterdir():
        (folder / path.name).symlink_to(path)
    words = {"user": 1, "bot": 2, "hello": 3, "world": 4, "[UNK]": 5}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=model, unk_token="[UNK]")
    tokenizer.chat_template = "user {{ messages[0].content }} bot"
    tokenizer.save_pretrained(folder)
    return folder


def collect(target_dir: Path, prompts: Path, out: Path) -> Result:
    command = ["answers", prompts, "--target", target_dir, "--out", out, "--batch-size", 2]
    arguments = [str(argument) for argument in [*command, "--max-new-tokens", 5]]
    return CliRunner().invoke(cli, arguments)


def test_answers_are_written_as_token_ids(
    chat_target_dir: Path, target: Any, tmp_path: Path
) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    texts = ["hello world", "hello", "world hello hello"]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))

    result = collect(chat_target_dir, prompts, out)

    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    encoded = [[1, 3, 4, 2], [1, 3, 2], [1, 4, 3, 3, 2]]
    assert [row["prompt_ids"] for row in rows] == encoded
    by_hand = [greedy_by_hand(target, prompt, 5) for prompt in encoded]
    assert [row["output_ids"] for row in rows] == by_hand
    assert_explained(collect(chat_target_dir, prompts, out), "must be a new file")


def test_prompts_and_targets_that_cannot_be_used_are_explained(
    chat_target_dir: Path, target_dir: Path, tmp_path: Path
) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text('{"prompt": "hello"}\n{"prompt": 7}\n')
    assert_explained(collect(chat_target_dir, prompts, out), ":2: prompt: must be a text")
    prompts.write_text("")
    assert_explained(collect(chat_target_dir, prompts, out), "must hold at least one prompt")
    prompts.write_text('{"prompt": "hello"}\n')
    assert_explained(collect(target_dir, prompts, out), "must hold a tokenizer")
    assert not out.exists()


def test_missing_packages_are_explained(
    target_dir: Path, answer_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # makes `import torch` fail
    result = train(answer_file, "--target", target_dir, "--out", tmp_path / "head")
    assert result.exit_code == 1
    assert "training needs torch, transformers and safetensors" in result.stderr


def test_importing_the_package_loads_no_torch() -> None:
    code = "import sys, autotune.demo.training.__main__; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
