"""The algorithm: equations by hand, packed log-probs against plain ones, who may read c, files and flags."""

import contextlib
import copy
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import random
import re
import resource
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import colbench
import simulator
import sweet_rl
from test_simulator import FAULTS, choice, server
from colbench import ANSWER_MARKER, InputError, Task, Trajectory, miniature_code, miniature_tasks
from simulator import chat_prompt, text_ids
from sweet_rl import (
    METHODS,
    STAGES,
    Branch,
    Encoder,
    Example,
    HeadCritic,
    Run,
    Sweet,
    Trainer,
    bradley_terry_loss,
    critic_objective,
    dpo_loss,
    dpo_objective,
    head_objective,
    likelihood_objective,
    log_probs,
    main,
    nll,
    pack,
    parse_settings,
    save_model,
    turn_advantages,
    warm_cosine,
)

CPU = torch.device("cpu")


# ---------------------------------------------------------------------------------------------------------
# The mathematics, by hand
def test_a_turn_of_one_token_weighs_as_much_as_a_turn_of_nine():
    """+1 on one token, -1 on nine: the means are +1 and -1, and their sum is 0, where a flat mean is -0.8."""
    turn_ids = torch.tensor([[0] + [1] * 9])
    ref_logps = -torch.arange(1.0, 11.0)[None]
    logps = ref_logps + torch.tensor([[1.0] + [-1.0] * 9])
    advantages = turn_advantages(logps, ref_logps, turn_ids)
    assert advantages.tolist() == [[1.0, -1.0]] and advantages.sum() == 0
    assert turn_advantages(logps, ref_logps, turn_ids, normalize=False).tolist() == [[1.0, -9.0]]


def test_turn_advantages_of_two_rows():
    turn_ids = torch.tensor([[0, 0, 1, 2], [0, -1, -1, -1]])
    log_ratio = torch.tensor([[0.5, 1.5, 2.0, -1.0], [3.0, 7.0, 7.0, 7.0]])  # the sevens are padding
    assert turn_advantages(log_ratio, torch.zeros(2, 4), turn_ids).tolist() == [[1.0, 2.0, -1.0], [3.0, 0.0, 0.0]]


@pytest.mark.parametrize(
    "turn_ids, advantages",
    [
        ([[0, 0, 2]], [[1.0, 0.0, 1.0]]),  # turn 1 was cut before its first token
        ([[-1, -1, -1]], [[0.0]]),
        ([[]], [[0.0]]),
    ],
)
def test_an_empty_turn_divides_nothing_by_zero(turn_ids, advantages):
    turn_ids = torch.tensor(turn_ids, dtype=torch.long)
    logps = torch.zeros(turn_ids.shape, requires_grad=True)
    found = turn_advantages(logps + 1, torch.zeros(turn_ids.shape), turn_ids)
    assert found.tolist() == advantages
    found.sum().backward()
    assert logps.grad.isfinite().all()


def test_equal_weights_have_an_advantage_of_exactly_zero():
    logps = torch.randn(3, 7)
    turn_ids = torch.tensor([[0, 0, 0, 1, 1, 2, -1]] * 3)
    assert torch.equal(turn_advantages(logps, logps.clone(), turn_ids), torch.zeros(3, 3))


@pytest.mark.parametrize(
    "chosen, rejected, beta, loss",
    [
        ([0.2, 0.3], [0.1, -0.4], 2.0, 0.183901),  # -log sigma(2 * (0.5 + 0.3)) = log(1 + exp(-1.6))
        ([0.2, 0.3], [0.1, -0.4], 0.1, 0.653947),  # log(1 + exp(-0.08))
        ([1.0, -1.0], [0.0, 0.0], 5.0, math.log(2)),
        ([-5.0, -5.0], [0.0, 0.0], 100.0, 1000.0),  # no overflow
    ],
)
def test_bradley_terry_loss(chosen, rejected, beta, loss):
    found = bradley_terry_loss(torch.tensor([chosen, rejected]), torch.tensor([rejected, chosen]), beta)
    swapped = loss + beta * (sum(chosen) - sum(rejected))  # -log sigma(-z) = z - log sigma(z)
    assert found.tolist() == pytest.approx([loss, swapped], rel=1e-4)


def test_dpo_loss():
    """Log-ratios 1 and -0.5 at beta 0.1: -log sigma(0.15) = log(1 + exp(-0.15)); without a margin log 2."""
    found = dpo_loss(*torch.tensor([[-1.0, -1.0], [-3.0, -2.0], [-2.0, -3.0], [-2.5, -4.0]]), 0.1)
    assert found.tolist() == pytest.approx([0.620957, math.log(2)], abs=1e-5)


def test_nll_is_a_mean_over_each_rows_own_tokens():
    logps = torch.tensor([[-1.0, -2.0, -9.0], [-3.0, -9.0, -9.0], [-9.0, -9.0, -9.0]])
    turn_ids = torch.tensor([[0, 1, -1], [0, -1, -1], [-1, -1, -1]])
    assert nll(logps, turn_ids).tolist() == [1.5, 3.0, 0.0]


PAIRS = torch.tensor([[0, 1, 1], [0, -1, -1], [0, 0, 0], [0, 1, -1]])  # chosen, rejected, chosen, rejected
PAIR_LOGPS = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, 0.0, 0.0], [-1.0, -1.0, -1.0], [-2.0, -2.0, 0.0]])
PAIR_REFERENCE = torch.tensor([[-2.0, -2.0, -2.0], [-3.0, 0.0, 0.0], [-1.0, -1.0, -4.0], [-1.0, -1.0, 0.0]])


def test_critic_objective():
    """Advantages (1, -0.5) against (-1), and (1) against (-1, -1); likelihoods 2 and 1."""
    losses, metrics = critic_objective(2.0, 0.01)(PAIR_LOGPS, PAIR_REFERENCE, PAIRS)
    wanted = [math.log(1 + math.exp(-3)) + 0.02, math.log(1 + math.exp(-6)) + 0.01]
    assert losses.tolist() == pytest.approx(wanted, rel=1e-5)
    assert metrics["margin"].tolist() == [1.5, 3.0] and metrics["accuracy"].tolist() == [1.0, 1.0]
    assert metrics["nll"].tolist() == [2.0, 1.0]


def test_dpo_objective():
    """Summed log-ratios 0 against -1, and 3 against -2."""
    losses, metrics = dpo_objective(0.5, 0.01)(PAIR_LOGPS, PAIR_REFERENCE, PAIRS)
    wanted = [math.log(1 + math.exp(-0.5)) + 0.02, math.log(1 + math.exp(-2.5)) + 0.01]
    assert losses.tolist() == pytest.approx(wanted, rel=1e-5)
    assert metrics["reward_chosen"].tolist() == [0.0, 3.0] and metrics["reward_rejected"].tolist() == [-1.0, -2.0]


TURN_VALUES = torch.tensor([[2.0, -1.0, -1.0], [3.0, 0.0, 0.0], [1.0, 1.0, 1.0], [-1.0, -2.0, 0.0]])  # one value a turn


@pytest.mark.parametrize(
    "success, wanted",
    [
        (False, [math.log(1 + math.exp(4)), math.log(1 + math.exp(-8))]),  # sums 1 against 3, 1 against -3, beta 2
        (True, [(0.126928 + 1.313262) / 2, 3.048587, 0.313262, (0.313262 + 0.126928) / 2]),  # means over turns, log(1 + e^x)
    ],
)
def test_head_objective(success, wanted):
    losses, metrics = head_objective(2.0, success)(TURN_VALUES, torch.zeros(4, 3), PAIRS)
    assert losses.tolist() == pytest.approx(wanted, rel=1e-5)
    assert metrics["margin"].tolist() == [-2.0, 4.0] and "nll" not in metrics


def test_likelihood_objective_gives_each_token_the_same_weight():
    """Rows of 3, 1, 3 and 2 tokens, mean 2.25: their losses add up to minus all log-probs over 2.25."""
    losses, metrics = likelihood_objective(2.25)(PAIR_LOGPS, torch.zeros(4, 3), PAIRS)
    assert losses.tolist() == pytest.approx([6 / 2.25, 4 / 2.25, 3 / 2.25, 4 / 2.25])
    assert metrics["nll"].tolist() == [2.0, 4.0, 1.0, 2.0]


@pytest.mark.parametrize(
    "step, steps, factor",
    [
        (0, 100, 1 / 3),  # 3 % of 100 steps are 3
        (1, 100, 2 / 3),
        (2, 100, 1.0),
        (3, 100, 1.0),
        (53, 103, 0.55),  # half of the cosine's 100 steps
        (103, 103, 0.1),
        (0, 1, 1.0),
    ],
)
def test_warm_cosine(step, steps, factor):
    assert warm_cosine(step, steps) == pytest.approx(factor)


# ---------------------------------------------------------------------------------------------------------
# Packed log-probs
SMALL = dict(
    vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
    num_key_value_heads=2, max_position_embeddings=256, bos_token_id=None, eos_token_id=1, pad_token_id=0, initializer_range=0.3,
)  # fmt: skip


def small_model(kind="llama", attention="sdpa", **more):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SMALL | more)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def slow_log_probs(model, branch: Branch) -> list[float]:
    """The textbook's way: each turn's whole sequence alone, a log-softmax of all of it, the action's part."""
    values = []
    for prompt, action in zip(branch.prompts, branch.actions):
        logps = model(torch.tensor([prompt + action])).logits[0].float().log_softmax(-1)
        values += [logps[len(prompt) - 1 + i, token].item() for i, token in enumerate(action)]
    return values


def random_tree(rng) -> list[Branch]:
    """A few dialogues of one to three turns, which share beginnings; token 0 and token 1 (pad, end) occur too."""

    def tokens(least, most):
        return [rng.randrange(50) for _ in range(rng.randint(least, most))]

    request, branches = tokens(1, 9), []
    for _ in range(rng.randint(1, 5)):
        branch = Branch([request], [tokens(0, 5)])
        if branches and rng.random() < 0.5:  # the first turns of an earlier one
            known = rng.choice(branches)
            keep = rng.randint(1, len(known.prompts))
            branch = Branch(known.prompts[:keep], known.actions[:keep])
        while len(branch.prompts) < 3 and rng.random() < 0.6:  # what is SEEN of an action may be another text
            seen = branch.actions[-1] if rng.random() < 0.7 else tokens(1, 3)
            branch = Branch([*branch.prompts, branch.prompts[-1] + seen + tokens(1, 4)], [*branch.actions, tokens(1, 5)])
        branches.append(branch)
    return branches


def assert_same_log_probs(model, groups):
    with torch.no_grad():
        packed = pack(groups)
        found = log_probs(model, packed)
        for row, turn_ids, branch in zip(found, packed.turn_ids, [b for group in groups for b in group], strict=True):
            wanted = slow_log_probs(model, branch)
            assert row[: len(wanted)].tolist() == pytest.approx(wanted, abs=1e-5)
            assert not row[len(wanted) :].any() and (turn_ids[len(wanted) :] == -1).all()
    assert found.dtype == torch.float32


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_packed_equals_plain_over_random_trees(heads, tied, seed):
    rng = random.Random(seed)
    model = small_model(num_key_value_heads=heads, tie_word_embeddings=tied)
    assert_same_log_probs(model, [random_tree(rng) for _ in range(4)])


ARCHITECTURES = {
    "eager attention": dict(attention="eager"),  # adds its mask, where sdpa looks it up
    "qwen2": dict(kind="qwen2"),
    "qwen3": dict(kind="qwen3"),
    "mistral within its sliding window": dict(kind="mistral", sliding_window=128),
    "granite scales its logits": dict(kind="granite", logits_scaling=4.0),
    "cohere scales its logits": dict(kind="cohere", logit_scale=0.25),
    "gemma2 caps its logits": dict(kind="gemma2", attention="eager", sliding_window=64, final_logit_softcapping=5.0),
    "gemma3": dict(kind="gemma3_text", sliding_window=64),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_packed_equals_plain_for_other_models(name):
    rng = random.Random(0)
    assert_same_log_probs(small_model(**ARCHITECTURES[name]), [random_tree(rng) for _ in range(4)])


def test_a_recurrent_model_falls_back_to_plain_rows_and_says_so(capsys):
    torch.manual_seed(0)
    sizes = dict(vocab_size=50, hidden_size=32, num_hidden_layers=2, state_size=8, initializer_range=0.3)
    config = AutoConfig.for_model("mamba", **sizes)
    model = AutoModelForCausalLM.from_config(config).eval()
    branches = random_tree(random.Random(0)) + random_tree(random.Random(1))
    with torch.no_grad():
        found = [trainer().log_probs(model, [Example(branches)])[0] for _ in range(2)][1]
    assert capsys.readouterr().out.count("MambaForCausalLM cannot take") == 1
    for row, branch in zip(found, branches, strict=True):
        wanted = slow_log_probs(model, branch)
        assert row[: len(wanted)].tolist() == pytest.approx(wanted, abs=1e-5)


def test_a_model_that_takes_trees_is_packed_silently(capsys):
    assert sweet_rl.takes_trees(small_model()) and not capsys.readouterr().out


def test_a_row_beyond_a_sliding_window_falls_back_to_plain_rows_and_says_so(capsys):
    model, branches = small_model(kind="mistral", sliding_window=9), random_tree(random.Random(0))
    with torch.no_grad():
        found = [trainer().log_probs(model, [Example(branches)])[0] for _ in range(2)][1]
    assert capsys.readouterr().out.count("the model looks back 9:") == 1
    for row, branch in zip(found, branches, strict=True):
        wanted = slow_log_probs(model, branch)
        assert row[: len(wanted)].tolist() == pytest.approx(wanted, abs=1e-5)


class Sizes(TorchDispatchMode):
    """Bytes of every tensor that is made, views left out."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in given:
                self.made.append(x.untyped_storage().nbytes())
        return out


def test_a_long_history_and_a_large_vocabulary_in_little_memory():
    """8,000 tokens and 128,256 words: nothing above 400 MB is made, where all logits would be 4 GB."""
    sizes = dict(vocab_size=128_256, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1)
    model = small_model(**sizes).train()
    history = [i % 1000 for i in range(8000)]
    example = Example([Branch([history], [[i] * 270]) for i in (1000, 1001)])
    with Sizes() as sizes:
        trainer().accumulate(model, [example], dpo_objective(0.1, 0.1))
    assert max(sizes.made) < 400e6 and model.lm_head.weight.grad.any()


def test_memory_and_work_grow_linearly_with_the_number_of_histories():
    totals = []
    for count in (2, 8):
        histories = [[i, *range(2, 40)] for i in range(count)]
        groups = [[Branch([history], [[40 + i, 49]]) for i in range(4)] for history in histories]
        with Sizes() as sizes:
            log_probs(small_model(), pack(groups)).sum().backward()
        totals.append(sum(sizes.made))
    assert totals[1] < 4.2 * totals[0]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("plain", [False, True], ids=["trees", "plain rows"])
def test_a_head_reads_the_mean_state_of_everything_up_to_the_end_of_a_turn(seed, plain):
    """Against each turn's whole sequence alone; every token of a turn has the turn's value, a turn without tokens none."""
    rng = random.Random(seed)
    critic = HeadCritic(small_model())
    torch.nn.init.normal_(critic.head.weight), torch.nn.init.ones_(critic.head.bias)
    groups = [random_tree(rng) for _ in range(4)]
    with torch.no_grad():
        packed = pack(groups, plain=plain)
        found = critic.turn_values(packed)
        for row, turn_ids, branch in zip(found, packed.turn_ids, [b for group in groups for b in group], strict=True):
            wanted = []
            for prompt, action in zip(branch.prompts, branch.actions):
                states = critic.model.model(torch.tensor([prompt + action])).last_hidden_state[0]  # (L, H)
                wanted += [critic.head(states.mean(0)).item()] * len(action)
            assert row[turn_ids >= 0].tolist() == pytest.approx(wanted, abs=1e-5) and not row[turn_ids < 0].any()


def test_the_drawing():
    """History 7 8 9, branches 3 4 and 5 4 6, as in the comment above `pack`."""
    packed = pack([[Branch([[7, 8, 9]], [[3, 4]]), Branch([[7, 8, 9]], [[5, 4, 6]])]])
    assert packed.input_ids.tolist() == [[7, 8, 9, 3, 4, 5, 4, 6]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 4, 3, 4, 5]]
    sees = [[j for j in range(8) if packed.mask[0, 0, i, j]] for i in range(8)]
    assert sees == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 5], [0, 1, 2, 5, 6], [0, 1, 2, 5, 6, 7]]
    assert packed.source.tolist() == [[2, 3, 0], [2, 5, 6]]
    assert packed.targets.tolist() == [[3, 4, 0], [5, 4, 6]]
    assert packed.turn_ids.tolist() == [[0, 0, -1], [0, 0, 0]] and packed.last.tolist() == [[4, 4, 0], [7, 7, 7]]


def test_where_nothing_branches_the_row_is_the_plain_sequence():
    """Two turns: 2 3 | 4 5, then 2 3 4 5 6 | 7."""
    packed = pack([[Branch([[2, 3], [2, 3, 4, 5, 6]], [[4, 5], [7]])]])
    assert packed.input_ids.tolist() == [[2, 3, 4, 5, 6, 7]] and packed.position_ids.tolist() == [list(range(6))]
    assert torch.equal(packed.mask[0, 0], torch.ones(6, 6, dtype=torch.bool).tril())
    assert packed.targets.tolist() == [[4, 5, 7]] and packed.turn_ids.tolist() == [[0, 0, 1]]


def test_each_shared_token_is_computed_once():
    history = list(range(2, 42))
    packed = pack([[Branch([history], [[i, 1]]) for i in range(2, 18)]])
    assert packed.input_ids.shape == (1, 40 + 16 * 2)


def test_a_row_alone_and_padded_by_fifty():
    """Next to a longer row, also where pad token == end token: pads are known by length, not by id."""
    model = small_model().double()  # or rounding alone reaches the bound on some CPUs
    short = Branch([[0, 1, 5]], [[0, 3, 1]])  # its first token is the padding's id
    long = Branch([list(range(2, 50)) + [2, 3, 4]], [[9, 1, 0, 0]])
    with torch.no_grad():
        alone = log_probs(model, pack([[short]]))
        padded = log_probs(model, pack([[long], [short]]))
    assert pack([[long], [short]]).input_ids.shape[1] >= pack([[short]]).input_ids.shape[1] + 45
    assert padded[1, :3].tolist() == pytest.approx(alone[0].tolist(), abs=1e-6)
    assert padded[1, 3] == 0


def test_branches_with_nothing_in_them():
    packed = pack([[Branch([[3, 4]], [[]]), Branch([[3, 4]], [[]])]])
    logps = log_probs(small_model(), packed)
    assert turn_advantages(logps, logps, packed.turn_ids).tolist() == [[0.0], [0.0]]


def test_chunked_logits_are_the_unchunked_ones(monkeypatch):
    """Three answer positions at a time: same values, same gradients; and no logits for any prompt token."""
    model = small_model()
    groups = [random_tree(random.Random(seed)) for seed in range(3)]
    packed = pack(groups)
    sizes = []
    model.lm_head.register_forward_hook(lambda head, states, logits: sizes.append(len(logits)))

    def values_and_gradients():
        model.zero_grad(), sizes.clear()
        logps = log_probs(model, packed)
        forward = list(sizes)
        (logps * torch.arange(logps.numel()).view_as(logps).cos()).sum().backward()
        return logps.detach(), [p.grad.clone() for p in model.parameters()], forward

    whole, whole_gradients, forward = values_and_gradients()
    assert forward == [sum(map(len, (action for group in groups for b in group for action in b.actions)))]
    monkeypatch.setattr(sweet_rl, "LOGITS_AT_ONCE", 3 * 50)
    chunked, chunked_gradients, forward = values_and_gradients()
    assert max(forward) == 3 and len(forward) > 3
    torch.testing.assert_close(chunked, whole, atol=1e-6, rtol=0)
    torch.testing.assert_close(chunked_gradients, whole_gradients, atol=1e-4, rtol=1e-4)


def bigram(model):
    """The same model without attention: what comes next depends on the last token only."""
    model = copy.deepcopy(model)
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    return model


def test_means_do_not_depend_on_the_prompts_tokens():
    """Prompts of 3 and 21 tokens that end alike, for a model that looks at the last token only."""
    model, action = bigram(small_model()), [9, 10, 11, 1]
    packed = pack([[Branch([[5, 6, 7]], [action])], [Branch([[8] * 20 + [7]], [action])]])
    with torch.no_grad():
        logps = log_probs(model, packed)
    one, other = turn_advantages(logps, torch.zeros_like(logps), packed.turn_ids)[:, 0].tolist()
    assert one == pytest.approx(other, abs=1e-5) == pytest.approx(logps[0].mean().item(), abs=1e-5)
    assert nll(logps, packed.turn_ids).tolist() == pytest.approx([-one, -one], abs=1e-5)


# ---------------------------------------------------------------------------------------------------------
# Tokens
SYSTEM = {"role": "system", "content": "ask, then answer."}
REQUEST = {"role": "user", "content": "write fee(x) for a taxi."}


def user(text):
    return {"role": "user", "content": text}


def agent(text, **more):
    return {"role": "assistant", "content": text} | more


@pytest.fixture
def encoder(tokenizer):
    return Encoder(tokenizer, [tokenizer.eos_token_id])


def test_ids_are_prompt_ids_and_action_ids(encoder, tokenizer):
    """Even where the two texts together would be one token: "the rate is 3." is one of the tiny vocabulary."""
    own = sweet_rl.tiny_tokenizer()
    own.chat_template = own.chat_template.replace("<|assistant|>{% endif", "<|assistant|>the rate {% endif")
    own_encoder = Encoder(own, [own.eos_token_id])
    assert len(text_ids(own, "the rate is 3.")) == 1
    chosen, rejected = own_encoder.candidates([SYSTEM, REQUEST], [agent("is 3."), agent("x")])
    assert own.decode(chosen.prompts[0]).endswith("<|assistant|>the rate ")
    assert chosen.prompts == rejected.prompts
    assert own.decode(chosen.actions[0]) == "is 3.<|end|>" and len(chosen.actions[0]) > 2


@pytest.mark.parametrize("pad_is_end", [False, True])
def test_exactly_one_end_token_a_turn(pad_is_end):
    tokenizer = sweet_rl.tiny_tokenizer()
    if pad_is_end:
        tokenizer.pad_token = tokenizer.eos_token
    encoder, end = Encoder(tokenizer, [tokenizer.eos_token_id]), tokenizer.eos_token_id
    branch = encoder.dialogue([SYSTEM, REQUEST, agent("what?"), user("x"), agent("a"), user("y"), agent("")])
    assert [(action.count(end), action[-1]) for action in branch.actions] == [(1, end)] * 3
    packed = pack([[branch], [Branch([[5] * 90], [[6]])]])
    assert packed.targets[0].tolist().count(end) == 3 and packed.turn_ids[0, -1] == 2
    node = packed.input_ids[0].tolist().index(end, len(branch.prompts[0]))  # attended: the next token sees it
    assert packed.mask[0, 0, node + 1, node]


def test_a_cut_message_gets_no_end_token(encoder, tokenizer):
    whole, cut, nothing = agent("what?"), agent("what?", truncated=True), agent("", truncated=True)
    assert encoder.action(whole) == [*text_ids(tokenizer, "what?"), tokenizer.eos_token_id]
    assert encoder.action(cut) == text_ids(tokenizer, "what?") and encoder.action(nothing) == []


def test_the_raw_output_is_scored_after_what_was_seen(encoder, tokenizer):
    """Thoughts are part of the action that had them, and of no history."""
    first = agent("what?", output="thinking OUTPUT: what?")
    last = agent("ok", output="aha OUTPUT: ok")
    branch = encoder.dialogue([SYSTEM, REQUEST, first, user("x"), last])
    assert [tokenizer.decode(ids) for ids in branch.actions] == ["thinking OUTPUT: what?<|end|>", "aha OUTPUT: ok<|end|>"]
    begin = "<|system|>ask, then answer.<|end|><|user|>write fee(x) for a taxi.<|end|><|assistant|>"
    assert tokenizer.decode(branch.prompts[0]) == begin
    assert tokenizer.decode(branch.prompts[1]) == begin + "what?<|end|><|user|>x<|end|><|assistant|>"


def test_turn_ids_come_from_the_turns(encoder, tokenizer):
    """A message that reads like the template, or like another turn, changes nothing about whose token is whose."""
    texts = ["what?", "assistant user end", "what?"]
    branch = encoder.dialogue([SYSTEM, REQUEST, agent(texts[0]), user("<|x|>what?"), agent(texts[1]), user("a"), agent(texts[2])])
    packed = pack([[branch]])
    actions = [[*text_ids(tokenizer, text), tokenizer.eos_token_id] for text in texts]
    assert packed.targets[0].tolist() == sum(actions, [])
    assert packed.turn_ids[0].tolist() == [turn for turn, action in enumerate(actions) for _ in action]


def test_the_end_token_is_the_templates():
    """Of several ids that may end a message, the one that the template writes; the tokenizer's, where it writes none."""
    tokenizer = sweet_rl.tiny_tokenizer()
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    assert Encoder(tokenizer, sorted([pad, end])).end == end
    tokenizer.chat_template = tokenizer.chat_template.replace("<|end|>", "<|pad|>")
    assert Encoder(tokenizer, sorted([pad, end])).end == pad
    tokenizer.chat_template = tokenizer.chat_template.replace("<|pad|>", "")
    assert Encoder(tokenizer, sorted([pad, end])).end == end


def test_c_stands_in_the_system_message(encoder, tokenizer):
    plain = tokenizer.decode(encoder.prompt([SYSTEM, REQUEST]))
    hinted = tokenizer.decode(encoder.prompt([SYSTEM, REQUEST], "code {with} {hidden_information}"))
    hint = sweet_rl.HINT.replace("{hidden_information}", "code {with} {hidden_information}")
    assert hinted == plain.replace("ask, then answer.", "ask, then answer." + hint) != plain
    assert SYSTEM["content"] == "ask, then answer."


def test_c_stands_in_the_first_user_message_where_there_is_no_system_role():
    tokenizer = sweet_rl.tiny_tokenizer()
    refuse = "{% if messages[0].role == 'system' %}{{ raise_exception('none') }}{% endif %}"
    tokenizer.chat_template = refuse + tokenizer.chat_template
    text = tokenizer.decode(Encoder(tokenizer, [tokenizer.eos_token_id]).prompt([SYSTEM, REQUEST], "CODE"))
    assert text.startswith("<|user|>ask, then answer.") and text.index("CODE") < text.index("write fee(x)")


@pytest.mark.parametrize("task", sweet_rl.MINIATURES)
def test_the_tiny_model_is_tiny_and_knows_its_phrases(model, task):
    tokenizer = sweet_rl.tiny_tokenizer(task)
    assert model.num_parameters() < 2_000_000
    for phrase in filter(None, sweet_rl.MINIATURES[task].phrases()):
        assert len(text_ids(tokenizer, phrase)) == 1
    for text in ("", "é\n\t x = x * 77", miniature_code({"rate": 3, "limit": 20})):
        assert tokenizer.decode(text_ids(tokenizer, text)) == text


# ---------------------------------------------------------------------------------------------------------
# Losses of whole dialogues
def settings(*argv):
    return parse_settings(["--device", "cpu", *map(str, argv)])


def trainer(micro_batch=64, dtype=torch.float32):
    return Trainer(settings("--micro-batch", micro_batch), CPU, dtype)


def three_turns(encoder, first="what is the rate?", reply="the rate is 3."):
    return encoder.dialogue([SYSTEM, REQUEST, agent(first), user(reply), agent("what?"), user("no"), agent("ok")])


@pytest.mark.parametrize("objective", [critic_objective(5.0, 0.0), dpo_objective(5.0, 0.0)], ids=["critic", "mt-dpo"])
def test_the_trajectory_loss_reads_agent_turns_and_no_human_label(encoder, model, objective):
    """For a model that looks at the last token only, a human's words are of no consequence, as inputs or as labels."""
    model, rejected = bigram(model), encoder.dialogue([SYSTEM, REQUEST, agent("hello")])

    def loss(chosen):
        with torch.no_grad():
            logps, turn_ids = trainer().log_probs(model, [Example([chosen, rejected])])
            return objective(logps, torch.zeros_like(logps), turn_ids)[0].item()

    before = loss(three_turns(encoder))
    assert loss(three_turns(encoder, first="what is the limit?")) != pytest.approx(before, abs=1e-4)
    assert loss(three_turns(encoder, reply="i do not know. 7")) == pytest.approx(before, abs=1e-5)


def gradients(model):
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    return found


def pairs_of_turns(encoder, count):
    """`count` turns with different histories; turn i has i + 1 pairs of candidates of different lengths."""
    histories = [[SYSTEM, REQUEST, *[agent("what?"), user("x")] * i] for i in range(count)]
    said = ["what is the rate?", "what is the limit? now", "I WANT TO ANSWER:\ndef fee(x):\n    return x", "ok"]
    return [Example(encoder.candidates(history, [agent(t + str(i)) for t in said for i in range(2)][: 2 * i + 2]))
            for i, history in enumerate(histories)]  # fmt: skip


def dialogue_pairs(encoder):
    other = encoder.dialogue([SYSTEM, REQUEST, agent("hello")])
    return [Example([three_turns(encoder), other]), Example([other, three_turns(encoder, "what?", "y" * 30)])]


BATCHES = {
    "critic": (critic_objective(5.0, 0.01), dialogue_pairs),
    "actor": (dpo_objective(0.5, 0.01), lambda encoder: pairs_of_turns(encoder, 3)),
    "rft": (likelihood_objective(7.0), lambda encoder: [Example(e.branches[:1]) for e in dialogue_pairs(encoder)]),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_is_its_examples_one_by_one(encoder, model, name):
    """Loss, metrics and gradients of a batch are the means over its losses, however it is cut into micro-batches."""
    objective, make = BATCHES[name]
    batch, reference = make(encoder), small_reference(model)
    trainer().add_reference(reference, batch, name)
    losses = [max(1, len(example.branches) // 2) for example in batch]
    ones, one_gradients = [], []
    for example in batch:
        ones.append(trainer().accumulate(model, [example], objective))
        one_gradients.append(gradients(model))
    for micro_batch in (64, 2, 1):
        whole = trainer(micro_batch).accumulate(model, batch, objective)
        for key in whole:
            mean = sum(n * one[key] for n, one in zip(losses, ones)) / sum(losses)
            assert whole[key] == pytest.approx(mean, rel=1e-4, abs=1e-5)
        means = [sum(n * g for n, g in zip(losses, parts)) / sum(losses) for parts in zip(*one_gradients)]
        torch.testing.assert_close(gradients(model), means, atol=1e-5, rtol=1e-3)
    assert ones[0]["loss"] != ones[1]["loss"]


def small_reference(model):
    """Another model of the same shape, so that log-ratios are not all zero."""
    reference = copy.deepcopy(model)
    with torch.no_grad():
        for weight in reference.parameters():
            weight.mul_(0.9)
    return reference


@pytest.mark.parametrize("micro_batch", [1, 3, 64])
def test_reference_log_probs_are_those_of_each_branch_alone(encoder, model, micro_batch):
    batch = pairs_of_turns(encoder, 3)
    trainer(micro_batch).add_reference(model, batch, "x")
    logps, _ = trainer().log_probs(model, batch)
    stacked = sweet_rl.stack_reference(batch, logps)
    torch.testing.assert_close(stacked, logps.detach(), atol=1e-5, rtol=0)
    assert not stacked.requires_grad


def test_pairs_of_unequal_lengths_alternate_in_a_batch(encoder, model):
    """Rows are chosen, rejected, chosen, ... through the whole batch: an untrained policy has log 2 everywhere."""
    batch = pairs_of_turns(encoder, 4)
    trainer().add_reference(model, batch, "x")
    metrics = trainer(4).accumulate(model, batch, dpo_objective(0.5, 0.0))
    assert metrics["loss"] == pytest.approx(math.log(2), abs=1e-4) and metrics["margin"] == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize("name", ["critic", "actor"])
def test_training_widens_the_margin(encoder, model, name):
    objective, make = BATCHES[name]
    batch = make(encoder)
    trainer().add_reference(model, batch, name)
    history = trainer().train(model, batch, objective, name, 1e-3, epochs=12, batch_size=64)
    assert [row["step"] for row in history] == list(range(1, 13)) and {row["run"] for row in history} == {name}
    assert history[0]["margin"] == pytest.approx(0, abs=1e-4) and history[-1]["margin"] > 0.05
    assert history[-1]["loss"] < history[0]["loss"] and not model.training


@pytest.mark.parametrize(
    "pairs, batch_size, steps",
    [
        ([1] * 5, 2, 3),  # 2 + 2 + 1 examples
        ([4] * 6, 8, 3),  # two turns of four pairs make a batch of eight pairs
        ([4] * 3, 2, 3),  # never less than one turn
    ],
)
def test_batch_size_counts_pairs(model, encoder, pairs, batch_size, steps):
    examples = [Example(encoder.candidates([SYSTEM, REQUEST], [agent(str(i)) for i in range(2 * n)])) for n in pairs]
    assert len(trainer().train(model, examples, dpo_objective(1.0, 0.01), "x", 1e-5, 2, batch_size)) == 2 * steps


def test_the_optimizer_is_the_papers(model, encoder, monkeypatch):
    seen = {}

    class Spy(torch.optim.AdamW):
        def __init__(self, parameters, **given):
            seen.update(given)
            super().__init__(parameters, **given)

    def clip(parameters, most):
        seen["clip"] = most
        return clip_for_real(parameters, most)

    clip_for_real = torch.nn.utils.clip_grad_norm_
    monkeypatch.setattr(torch.optim, "AdamW", Spy)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip)
    history = trainer().train(model, dialogue_pairs(encoder), dpo_objective(1.0, 0.01), "x", 2e-7, 1, 1)
    assert seen == {"lr": 2e-7, "betas": (0.9, 0.95), "weight_decay": 0.0, "fused": False, "clip": 1.0}
    assert [row["lr"] for row in history] == pytest.approx([2e-7, 2e-7])  # two steps: warm at once, then the cosine's top


def test_bfloat16_computes_and_float32_keeps(model, encoder):
    """At the paper's learning rate of 2e-7 a bfloat16 weight would never change."""
    before = model.model.embed_tokens.weight.detach().clone()
    exact, _ = trainer().log_probs(model, dialogue_pairs(encoder))
    rounded, _ = trainer(dtype=torch.bfloat16).log_probs(model, dialogue_pairs(encoder))
    assert exact.dtype == rounded.dtype == torch.float32
    assert 0 < (exact - rounded).abs().max() < 0.5
    trainer(dtype=torch.bfloat16).train(model, dialogue_pairs(encoder), dpo_objective(1.0, 0.01), "x", 2e-7, 1, 1)
    after = model.model.embed_tokens.weight
    assert after.dtype == torch.float32 and 0 < (after - before).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_at_the_papers_learning_rate_a_bfloat16_weight_never_moves(model, encoder, dtype):
    """The same training with bfloat16 compute: weights of ordinary size in bfloat16 stay where they are, in float32 they move."""
    model.to(dtype)
    before = [weight.detach().clone() for weight in model.parameters()]
    trainer(dtype=torch.bfloat16).train(model, dialogue_pairs(encoder), dpo_objective(1.0, 0.01), "x", 2e-7, 2, 1)
    moved = torch.cat([(old != new)[old.abs() > 1e-3] for old, new in zip(before, model.parameters())]).float().mean()
    assert moved == 0 if dtype == torch.bfloat16 else moved > 0.5


@pytest.fixture
def like_a_real_one(model, tokenizer, tmp_path):
    """`like_a_real_one(*flags)`: a Sweet whose --model is a folder, as of a model from elsewhere."""
    sweet_rl.save_model(model, tokenizer, tmp_path / "model")
    return lambda *flags: Sweet(settings("--model", tmp_path / "model", "--out", tmp_path / "out", *flags))


def test_what_is_frozen_samples_and_scores_in_the_compute_precision(like_a_real_one):
    sweet = like_a_real_one("--precision", "bfloat16", "--max-new-tokens", 4)
    model, tokenizer, encoder = sweet.model("base")
    assert model.dtype == torch.bfloat16 and sweet.model("base", train=True)[0].dtype == torch.float32
    assert len(sweet.agent(model, tokenizer).sample([[REQUEST]], 3)[0]) == 3
    logps, _ = sweet.trainer.log_probs(model, dialogue_pairs(encoder))
    exact, _ = trainer().log_probs(model.float(), dialogue_pairs(encoder))
    assert logps.dtype == torch.float32 and 0 < (logps - exact).abs().max() < 0.5


def test_activations_computed_again_change_nothing(like_a_real_one):
    """Log-probs and gradients under a tree's mask, with and without; with, the backward pass runs each layer again."""
    model, _, encoder = like_a_real_one().model("base", train=True)
    batch, found, calls = pairs_of_turns(encoder, 3), [], []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    model.train()
    for again in (True, False):
        if not again:
            model.activation_checkpointing_disable()
        logps, turn_ids = trainer().log_probs(model, batch)
        calls.clear()
        nll(logps, turn_ids).sum().backward()
        found.append((len(calls), logps.detach(), gradients(model)))
    (once_more, *ours), (never, *plain) = found
    assert (once_more, never) == (1, 0)
    torch.testing.assert_close(ours, plain, atol=1e-6, rtol=1e-5)


def test_too_long_dialogues_are_left_out_and_counted(encoder, capsys):
    short, long = dialogue_pairs(encoder)
    limit = short.longest()
    assert long.longest() > limit
    assert sweet_rl.fitting([short, long], limit) == [short]
    assert "1 of 2 left out" in capsys.readouterr().out
    with pytest.raises(InputError, match="--max-length"):
        sweet_rl.fitting([long], limit)


# ---------------------------------------------------------------------------------------------------------
# Scores and pairs
@pytest.fixture
def sweet(tmp_path):
    return Sweet(settings("--out", tmp_path / "out", "--micro-batch", 3))


SENTINEL = "SENTINEL"
CODE = "def fee(x):\n    return x"


def candidate_rows(count, texts=("what?", "what is the rate?", "", "ok then")):
    history = [SYSTEM, REQUEST]
    cut = [text == "" for text in texts]
    return [{"messages": history + [agent("a"), user("b")] * i, "candidates": list(texts), "truncated": cut, "ground_truth": CODE}
            for i in range(count)]  # fmt: skip


def test_scores_are_equation_3_with_c_on_both_sides(sweet, model, encoder):
    """Against each candidate alone, the slow way; a cut candidate without any token scores 0."""
    critic, reference, rows = model, small_reference(model), candidate_rows(3)
    found = sweet.score(critic, reference, encoder, rows)
    for row, scores in zip(rows, found, strict=True):
        prompt = encoder.prompt(row["messages"], CODE)
        for text, score in zip(row["candidates"], scores, strict=True):
            branch = Branch([prompt], [encoder.action(agent(text)) if text else []])
            ours, theirs = slow_log_probs(critic, branch), slow_log_probs(reference, branch)
            assert score == pytest.approx((sum(ours) - sum(theirs)) / max(1, len(ours)), abs=1e-5)
    assert found[0][0] != 0 and found[0][2] == 0


def test_an_untrained_critic_scores_exactly_zero(sweet, model, encoder):
    assert sweet.score(model, copy.deepcopy(model), encoder, candidate_rows(5)) == [[0.0] * 4] * 5


def test_ablations_of_the_score(sweet, model, encoder):
    """Without 1/L the sum over the tokens, without c the same with a prompt that has none."""
    reference, rows = small_reference(model), candidate_rows(1)
    for no_hint, no_normalize in ((False, True), (True, False), (True, True)):
        sweet.settings.no_hint, sweet.settings.no_normalize = no_hint, no_normalize
        prompt = encoder.prompt(rows[0]["messages"], None if no_hint else CODE)
        branch = Branch([prompt], [encoder.action(agent("what is the rate?"))])
        ratio = sum(slow_log_probs(model, branch)) - sum(slow_log_probs(reference, branch))
        wanted = ratio if no_normalize else ratio / len(branch.actions[0])
        assert sweet.score(model, reference, encoder, rows)[0][1] == pytest.approx(wanted, abs=1e-5)


def test_a_head_critic_is_saved_beside_its_model_and_scores_without_a_reference(sweet, model, tokenizer, encoder):
    critic = HeadCritic(model)
    torch.nn.init.normal_(critic.head.weight), torch.nn.init.ones_(critic.head.bias)
    sweet_rl.save_model(critic, tokenizer, sweet.run.path("critic"))
    assert (sweet.run.path("critic") / "head.safetensors").exists()
    loaded = sweet.model("critic")[0]
    assert isinstance(loaded, HeadCritic) and torch.equal(loaded.head.weight, critic.head.weight) and not loaded.training
    (scores,) = sweet.score(loaded, None, encoder, candidate_rows(1))
    ids = encoder.prompt([SYSTEM, REQUEST], CODE) + encoder.action(agent("what?"))
    with torch.no_grad():
        wanted = critic.head(model.model(torch.tensor([ids])).last_hidden_state[0].mean(0)).item()
    assert scores[0] == pytest.approx(wanted, abs=1e-5) and scores[2] == 0


@pytest.mark.parametrize("success", [False, True], ids=["regression", "value"])
def test_training_widens_the_margin_of_a_head(encoder, model, success):
    history = trainer().train(HeadCritic(model), dialogue_pairs(encoder)[:1], head_objective(1.0, success), "critic", 3e-3, 12, 64)
    assert history[0]["margin"] == 0 and history[-1]["margin"] > 0.05 and history[-1]["loss"] < history[0]["loss"]


def played(task: Task, *said, reward=None, answer="") -> Trajectory:
    """A dialogue by hand; `said` are the messages after the request, agent and human in turn."""
    turns = [agent(text, output=text, input="") if i % 2 == 0 else user(text) for i, text in enumerate(said)]
    return Trajectory(task, [user(task.problem_description), *turns], answer, reward)


def test_pairs_by_the_backend_rule(sweet):
    """The first full success of a task against every lower reward; nothing across tasks, nothing without a reward."""
    tasks = [Task(f"task {i}", f"code {i}", {}) for i in range(4)] + [Task("task 0", "other code", {})]
    rewards = [[0.5, 1.0, 0.2, 1.0, None], [0.9, 0.0], [1.0, 1.0], [1.0, 0.9], [0.0, 0.0]]
    rows = [played(t, f"{t.ground_truth} {r} {i}", reward=r) for t, rs in zip(tasks, rewards) for i, r in enumerate(rs)]
    rows += [played(tasks[0], reward=0.0)]  # a dialogue without any turn of the agent
    colbench.save_trajectories(sweet.run.path("trajectories.jsonl"), rows)
    path = sweet.run.path("trajectory_pairs.jsonl")
    sweet.pairs(path)
    made = colbench.read_jsonl(path, {"chosen": list, "rejected": list, "ground_truth": str})
    said = [(row["chosen"][-1]["content"], row["rejected"][-1]["content"]) for row in made]
    assert said == [("code 0 1.0 1", "code 0 0.5 0"), ("code 0 1.0 1", "code 0 0.2 2"), ("code 3 1.0 0", "code 3 0.9 1")]
    assert [row["ground_truth"] for row in made] == ["code 0", "code 0", "code 3"]
    assert made[0]["chosen"][:2] == [{"role": "system", "content": sweet.system}, user("task 0")]
    assert all("input" not in message for row in made for message in row["chosen"] + row["rejected"])


@pytest.mark.parametrize("stage", ["pairs", "rft"])
def test_no_success_is_one_clear_line(sweet, monkeypatch, model, tokenizer, encoder, stage):
    colbench.save_trajectories(sweet.run.path("trajectories.jsonl"), [played(Task("t", "c", {}), "x", reward=0.9)])
    monkeypatch.setattr(sweet, "model", lambda product, train=False: (model, tokenizer, encoder))
    with pytest.raises(InputError, match="trajectories.jsonl: no ") as caught:
        getattr(sweet, stage)(sweet.run.path(stage))
    assert "\n" not in str(caught.value)


def turn_pairs(sweet, *rows):
    """(chosen, rejected) messages that stage 5 makes of rows of (texts, advantages)."""
    made = [{"messages": [SYSTEM, user(str(i))], "candidates": t, "advantages": a} for i, (t, a) in enumerate(rows)]
    colbench.write_jsonl(sweet.run.path("candidates.jsonl"), made)
    path = sweet.run.path("turn_pairs.jsonl")
    sweet.turn_pairs(path)
    pairs = colbench.read_jsonl(path, {"prompt": list, "chosen": list, "rejected": list})
    assert all(set(row) == {"prompt", "chosen", "rejected"} for row in pairs)
    return [(row["prompt"][-1]["content"], row["chosen"][0]["content"], row["rejected"][0]["content"]) for row in pairs]


def test_turn_pairs_are_top_half_against_bottom_half(sweet):
    """50 turns of 16 candidates, 4 pairs each; over all of them each of the top 8 is chosen some time."""
    shuffled = random.Random(1).sample(range(16), 16)
    row = [f"text {i}" for i in shuffled], [i / 10 for i in shuffled]
    pairs = turn_pairs(sweet, *[row] * 50)
    assert [prompt for prompt, _, _ in pairs] == [str(i) for i in range(50) for _ in range(4)]
    assert {chosen for _, chosen, _ in pairs} == {f"text {i}" for i in range(8, 16)}
    assert {rejected for _, _, rejected in pairs} == {f"text {i}" for i in range(8)}


def test_of_an_odd_number_the_middle_one_is_in_no_half(sweet):
    assert set(turn_pairs(sweet, (["a", "b", "c"], [0.0, 1.0, 2.0]))) == {("0", "c", "a")}


def test_equal_texts_and_equal_scores_make_no_pair(sweet):
    rows = [
        (["a", "a"], [1.0, 0.0]),
        (["a", "b"], [0.5, 0.5]),
        (["a"], [1.0]),
        (["a", "b"], [0.0, 1.0]),
    ]
    assert turn_pairs(sweet, *rows) == [("3", "b", "a")] * 4
    with pytest.raises(InputError, match="candidates.jsonl: no turn"):
        turn_pairs(sweet, *rows[:3])


def test_a_cut_candidate_stays_cut_in_its_pair(sweet):
    row = {"messages": [SYSTEM, REQUEST], "candidates": ["a", "b"], "advantages": [1, 0], "truncated": [True, False]}
    colbench.write_jsonl(sweet.run.path("candidates.jsonl"), [row])
    sweet.turn_pairs(sweet.run.path("turn_pairs.jsonl"))
    pair = colbench.read_jsonl(sweet.run.path("turn_pairs.jsonl"), {})[0]
    assert pair["chosen"] == [agent("a", truncated=True)] and pair["rejected"] == [agent("b")]


@pytest.fixture
def trained_on(sweet, monkeypatch, model, tokenizer, encoder):
    """`trained_on(stage)`: the texts that a training stage learns from, and its other settings; nothing is trained."""
    seen = {}

    def fit(path, model, tokenizer, examples, objective, lr, epochs, batch_size, reference):
        decode = tokenizer.decode
        seen["texts"] = [[(decode(b.prompts[-1]), *map(decode, b.actions)) for b in e.branches] for e in examples]
        seen["rest"] = lr, epochs, batch_size, reference
        run.model, run.objective = model, objective

    def run(stage):
        getattr(sweet, stage)(sweet.run.path("anything"))
        return seen["texts"], seen["rest"]

    monkeypatch.setattr(sweet, "model", lambda product, train=False: (model, tokenizer, encoder))
    monkeypatch.setattr(sweet, "fit", fit)
    for number, name in enumerate(("critic", "actor", "rft", "mt_dpo"), 1):
        setattr(sweet.settings, f"{name}_lr", number / 1000)
        setattr(sweet.settings, f"{name}_epochs", number)
    sweet.settings.batch_size, sweet.settings.rft_batch_size = 8, 32
    return run


def test_the_actor_learns_from_turn_pairs(sweet, trained_on):
    """Chosen before rejected, all pairs of one history in one example, wherever they stand."""

    def row(request, chosen, rejected):
        return {"prompt": [SYSTEM, user(request)], "chosen": [agent(chosen)], "rejected": [agent(rejected, truncated=True)]}

    rows = [row("one", "a", "b"), row("two", "c", "d"), row("one", "e", "f")]
    colbench.write_jsonl(sweet.run.path("turn_pairs.jsonl"), rows)
    texts, rest = trained_on("actor")
    one, two = (f"<|system|>ask, then answer.<|end|><|user|>{x}<|end|><|assistant|>" for x in ("one", "two"))
    assert texts == [[(one, "a<|end|>"), (one, "b"), (one, "e<|end|>"), (one, "f")], [(two, "c<|end|>"), (two, "d")]]
    assert rest == (0.002, 2, 8, True)


@pytest.mark.parametrize("stage, hint, rest", [("critic", True, (0.001, 1, 8, True)), ("multi_turn_dpo", False, (0.004, 4, 8, True))])
def test_critic_and_multi_turn_dpo_learn_from_the_same_pairs(sweet, trained_on, stage, hint, rest):
    """Chosen before rejected, every turn of both; only the critic reads c, in both."""
    row = {"chosen": [SYSTEM, REQUEST, agent("a"), user("x"), agent("b")], "rejected": [SYSTEM, REQUEST, agent("c")]}
    colbench.write_jsonl(sweet.run.path("trajectory_pairs.jsonl"), [row | {"ground_truth": SENTINEL}])
    texts, found = trained_on(stage)
    ((_, *chosen), (_, *rejected)) = texts[0]
    assert (chosen, rejected) == (["a<|end|>", "b<|end|>"], ["c<|end|>"]) and found == rest
    assert [SENTINEL in prompt for prompt, *_ in texts[0]] == [hint, hint]


@pytest.mark.parametrize(
    "flags, hint, loss",
    [
        ({}, True, "eq. 3"),
        ({"no_hint": True}, False, "eq. 3"),
        ({"no_normalize": True}, True, "eq. 3 without 1/L"),
        ({"critic": "regression"}, True, "eq. 2 on values"),
        ({"critic": "value", "no_hint": True}, False, "cross-entropy"),
    ],
    ids=str,
)
def test_ablations_of_the_critic(sweet, trained_on, flags, hint, loss):
    vars(sweet.settings).update(flags, critic_beta=2.0, critic_nll=0.0)
    row = {"chosen": [SYSTEM, REQUEST, agent("a")], "rejected": [SYSTEM, REQUEST, agent("c")], "ground_truth": SENTINEL}
    colbench.write_jsonl(sweet.run.path("trajectory_pairs.jsonl"), [row])
    texts, (_, _, _, reference) = trained_on("critic")
    head = "critic" in flags
    assert (SENTINEL in texts[0][0][0]) == hint and reference == (not head)
    assert isinstance(trained_on.model, HeadCritic) == head
    losses, metrics = trained_on.objective(PAIR_LOGPS[:2], torch.zeros(2, 3), PAIRS[:2])  # turns -1 | -2 -3 against -4
    margin = {"eq. 3 without 1/L": -6 + 4}.get(loss, -3.5 + 4)
    value = (math.log(1 + math.e) + (math.log(1 + math.exp(2)) + math.log(1 + math.exp(3))) / 2) / 2
    wanted = [value, math.log(1 + math.exp(-4))] if loss == "cross-entropy" else [math.log(1 + math.exp(-2 * margin))]
    assert losses.tolist() == pytest.approx(wanted, rel=1e-5) and ("nll" in metrics) == (not head)


def test_rejection_fine_tuning_learns_from_full_successes(sweet, trained_on):
    rows = [played(Task("t", SENTINEL, {}), f"said {reward}", reward=reward) for reward in (0.9, 1.0, None, 0.0, 1.0)]
    colbench.save_trajectories(sweet.run.path("trajectories.jsonl"), rows)
    texts, rest = trained_on("rft")
    prompt = "<|system|>ask, then answer.<|end|><|user|>t<|end|><|assistant|>"
    assert texts == [[(prompt, "said 1.0<|end|>")]] * 2 and rest == (0.003, 3, 32, False)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("greedy", [False, True], ids=["sampled", "greedy"])
def test_what_is_evaluated(sweet, monkeypatch, model, tokenizer, encoder, method, greedy):
    """Each method's own weights, at temperature 1 or 0; a single turn has a prompt of its own."""
    loaded = []
    monkeypatch.setattr(sweet, "model", lambda product: loaded.append(product) or (model, tokenizer, encoder))
    monkeypatch.setattr(sweet, "play", lambda path, tasks, agent, human, turns, _: loaded.append((tasks, agent, turns)))
    sweet.settings.num_tasks = 5
    sweet.evaluate(method, sweet.run.path(f"eval_{method}{'_greedy' if greedy else ''}.jsonl"))
    product, (tasks, player, turns) = loaded
    assert product == {"single-turn": "base", "zero-shot": "base", "rft": "rft", "mt-dpo": "mt-dpo", "sweet": "actor"}[method]
    assert tasks == miniature_tasks("test", 5) and player.temperature == (0.0 if greedy else 1.0)
    single = method == "single-turn"
    assert turns == (1 if single else 10) and (player.system != sweet.system) == single


def test_best_of_n_takes_what_the_critic_ranks_first(sweet, monkeypatch, model, tokenizer, encoder):
    """Of the candidates of each history, scored with the c of its own task."""
    asked = []
    monkeypatch.setattr(sweet, "model", lambda product: (f"the {product}", tokenizer, encoder))

    def score(critic, reference, encoder, rows):
        asked.append((critic, reference, [(row["ground_truth"], row["messages"][-1]["content"]) for row in rows]))
        return [[0.1, 0.3, 0.2], [-1.0, -2.0, -2.0]]

    monkeypatch.setattr(sweet, "score", score)
    tasks, histories = [Task(name, f"c of {name}") for name in "ab"], [[{"role": "user", "content": name}] for name in "ab"]
    candidates = [[colbench.Action(f"{name}{i}") for i in range(3)] for name in "ab"]
    assert [action.text for action in sweet.chooser()(tasks, histories, candidates)] == ["a1", "b0"]
    assert asked == [("the critic", "the base", [("c of a", "a"), ("c of b", "b")])]


@pytest.mark.parametrize(
    "flags, method, loaded",
    [
        ([], "zero-shot", []),
        ([], "single-turn", []),
        ([], "mt-dpo", ["mt-dpo"]),
        (["--model", "some/model", "--tasks", "t"], "zero-shot", ["base"]),  # to play the human
    ],
    ids=str,
)
def test_where_a_server_plays_no_model_is_loaded(tmp_path, monkeypatch, model, tokenizer, encoder, flags, method, loaded):
    with server(lambda body, _: choice("x")) as (url, requests):
        sweet, found, players = Sweet(settings("--agent", url, "--out", tmp_path, *flags)), [], []
        monkeypatch.setattr(sweet, "model", lambda product: found.append(product) or (model, tokenizer, encoder))
        monkeypatch.setattr(sweet, "play", lambda path, tasks, agent, human, *_: players.append(agent))
        monkeypatch.setattr(sweet, "tasks", lambda split: [])
        sweet.evaluate(method, tmp_path / f"eval_{method}_greedy.jsonl")
    served = method != "mt-dpo"
    assert found == loaded and len(requests) == served  # asked once, whether it answers
    assert isinstance(players[0], simulator.ServerAgent) == served and players[0].temperature == 0
    assert (players[0].system == sweet.single_turn_system) == (method == "single-turn")


def test_a_line_of_metrics_is_first_and_last_tenth():
    history = [{"run": "x", "step": i, "loss": float(i), "lr": 1.0, "grad_norm": 1.0} for i in range(20)]
    assert sweet_rl.metrics_line(history) == "loss 0.500 -> 18.500"
    assert sweet_rl.metrics_line(history[:1]) == "loss 0.000 -> 0.000"


def test_the_human_is_the_untouched_model_never_the_actor(tmp_path, monkeypatch, model, tokenizer):
    monkeypatch.setattr(sweet_rl, "load_model", lambda *given, sees=False: ("one that sees" if sees else "untouched", given[0]))
    monkeypatch.setattr(sweet_rl, "LLMSimulator", lambda *given: given[:2])
    sweet = Sweet(settings("--model", "some/model", "--out", tmp_path))
    monkeypatch.setattr(sweet, "model", lambda product: ("untouched", "some/model", "encoder") if product == "base" else None)
    assert sweet.human("actor", "trained", "tokenizer") == ("untouched", "some/model")
    assert sweet.human("base", "at hand", "tokenizer") == ("at hand", "tokenizer")
    sweet.settings.simulator = "other/model"
    assert sweet.human("base", "at hand", "tokenizer") == ("untouched", "other/model")
    sweet.settings.task, sweet.settings.simulator = "frontend", "some/model"
    assert sweet.human("base", "at hand", "tokenizer") == ("one that sees", "some/model")
    for name, kind in (("scripted", simulator.ScriptedSimulator), ("keyboard", simulator.KeyboardSimulator)):
        sweet.settings.simulator = name
        assert isinstance(sweet.human("base", None, None), kind)


# ---------------------------------------------------------------------------------------------------------
# Settings
def test_the_paper_is_the_preset_of_a_named_model():
    s = settings("--model", "meta-llama/Llama-3.1-8B-Instruct")
    assert s.critic_lr == s.actor_lr == s.rft_lr == s.mt_dpo_lr == 2e-7
    assert s.critic_beta == s.actor_beta == s.mt_dpo_beta == 0.1
    assert s.critic_nll == s.actor_nll == s.mt_dpo_nll == 0.01
    assert (s.batch_size, s.rft_batch_size) == (8, 32)
    assert (s.critic_epochs, s.rft_epochs, s.mt_dpo_epochs, s.actor_epochs) == (4, 4, 4, 1)
    assert (s.candidates, s.pairs_per_turn, s.turn_fraction) == (16, 4, 0.1)
    assert (s.max_turns, s.max_new_tokens) == (10, 1024) and s.max_length >= 8192
    assert s.tasks == s.trajectories == "facebook/collaborative_agent_bench"
    assert s.simulator == s.model and s.out == "out/backend-Llama-3.1-8B-Instruct" and not s.is_tiny


def test_without_a_model_there_is_a_tiny_one():
    s = settings()
    assert s.is_tiny and s.simulator == "scripted" and s.out == "out/backend-tiny"
    assert s.tasks is s.trajectories is s.train_tasks is None
    assert s.critic_lr > 1e-5 and s.actor_lr > 1e-5  # settings of its own
    assert (s.candidates, s.pairs_per_turn) == (16, 4)


@pytest.mark.parametrize("model", [[], ["--model", "some/model"]], ids=["tiny", "model"])
def test_a_flag_beats_the_preset(model):
    s = settings(*model, "--critic-lr", "1e-3", "--candidates", "2", "--actor-nll", "0", "--seed", "7")
    assert (s.critic_lr, s.candidates, s.actor_nll, s.seed) == (1e-3, 2, 0.0, 7)


def test_ablations_are_flags():
    s = settings("--critic", "value", "--no-hint")
    assert (s.critic, s.no_hint, s.no_normalize) == ("value", True, False)
    assert (settings().critic, settings().no_hint) == ("logprob", False)


@pytest.mark.parametrize(
    "flags, tasks, train_tasks, trajectories",
    [
        (["--tasks", "a"], "a", "a", None),  # someone's own tasks: dialogues are collected on them
        (["--tasks", "a", "--train-tasks", "b"], "a", "b", None),
        (["--tasks", "a", "--trajectories", "t"], "a", None, "t"),
        (["--trajectories", "t"], "facebook/collaborative_agent_bench", None, "t"),
    ],
)
def test_where_the_data_comes_from(flags, tasks, train_tasks, trajectories):
    s = settings("--model", "some/model", *flags)
    assert (s.tasks, s.train_tasks, s.trajectories) == (tasks, train_tasks, trajectories)


def test_every_flag_is_explained(capsys):
    with pytest.raises(SystemExit) as ended:
        parse_settings(["--help"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    for field in sweet_rl.dataclasses.fields(sweet_rl.Settings):
        assert "--" + field.name.replace("_", "-") in shown and field.metadata["help"].split()[0] in shown


# ---------------------------------------------------------------------------------------------------------
# The run: files, once made, and what shaped them
def test_an_interrupted_file_goes_on_where_it_stopped(tmp_path):
    """Batches of two: killed in the third, with half a record written; the same rows, none for item 1, as without the break."""

    def rows(batch):
        asked.append(batch)
        if stop and batch[0] == 4:
            raise KeyboardInterrupt
        return [{"item": item, "dice": torch.rand(1).item()} if item != 1 else None for item in batch]

    files = []
    for name, broken in (("whole", False), ("broken", True)):
        run, asked, stop = Run(settings("--out", tmp_path / name)), [], broken
        path = run.path("candidates.jsonl")
        if broken:
            with pytest.raises(KeyboardInterrupt):
                run.rows_by_batch(path, list(range(7)), 2, rows)
            assert not path.exists()
            with open(next(run.out.glob("candidates.jsonl.*")), "a") as part:
                part.write('{"item": 4}\n{"item": 5, "di')
            asked, stop = [], False
        run.rows_by_batch(path, list(range(7)), 2, rows)
        files.append(path.read_bytes())
    assert asked == [[4, 5], [6]] and files[0] == files[1]
    assert [row["item"] for row in colbench.read_jsonl(path, {})] == [0, 2, 3, 4, 5, 6]
    assert {file.name for file in run.out.iterdir()} == {"candidates.jsonl", ".lock"}


def test_an_interrupted_file_of_other_settings_is_not_gone_on_with(tmp_path):
    def stop(batch):
        if batch == [1]:
            raise KeyboardInterrupt
        return [{"item": "old"}]

    path, run = tmp_path / "candidates.jsonl", Run(settings("--out", tmp_path, "--candidates", 4))
    with pytest.raises(KeyboardInterrupt):
        run.rows_by_batch(path, [0, 1], 1, stop)
    run.settings.candidates = 8
    run.rows_by_batch(path, [0, 1], 1, lambda batch: [{"item": "new"}])
    assert [row["item"] for row in colbench.read_jsonl(path, {})] == ["new", "new"]


def test_metrics_of_a_second_try_replace_those_of_the_first(tmp_path):
    run = Run(settings("--out", tmp_path))
    for value, name in ((1, "critic"), (2, "actor"), (3, "critic")):
        run.log([{"run": name, "step": 1, "loss": float(value)}])
    assert [row["loss"] for row in colbench.read_jsonl(tmp_path / "metrics.jsonl", {})] == [2, 3]


def test_a_second_run_in_the_same_folder_is_refused_in_one_line(tmp_path, capsys):
    first = Run(settings("--out", tmp_path))
    assert main(["--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --out ") and "another run" in error and error.count("\n") == 1
    assert [file.name for file in tmp_path.iterdir()] == [".lock"]
    first.lock.close()  # as when its process is gone
    Run(settings("--out", tmp_path))


@pytest.mark.skipif(not Path("/sys/kernel").exists(), reason="this folder nobody can write to")
def test_a_read_only_folder_is_one_line(capsys):
    assert main(["--out", "/sys"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --out /sys") and error.count("\n") == 1


@contextlib.contextmanager
def full_disk(size: int):
    """No file can grow beyond `size` bytes: python is told so in an OSError, as by a disk that is full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        with pytest.raises(InputError, match="cannot be written .*File too large") as caught:
            yield
        assert "\n" not in str(caught.value)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_on_a_full_disk_what_is_there_stays_whole(tmp_path, model, tokenizer):
    def rows(batch):
        played.extend(batch)
        return [{"item": item, "text": 400 * "x"} for item in batch]

    run, played, path = Run(settings("--out", tmp_path)), [], tmp_path / "candidates.jsonl"
    colbench.write_jsonl(tmp_path / "old.jsonl", [{"old": 1}])
    with full_disk(2000):
        colbench.write_jsonl(tmp_path / "old.jsonl", [{"new": 1}] * 1000)
    with full_disk(2000):
        save_model(model, tokenizer, tmp_path / "actor")
    with full_disk(2000):
        run.rows_by_batch(path, list(range(8)), 2, rows)
    assert {file.name.split(".")[0] for file in tmp_path.iterdir()} == {"", "old", "candidates"} and not path.exists()
    assert colbench.read_jsonl(tmp_path / "old.jsonl", {}) == [{"old": 1}]
    run.rows_by_batch(path, list(range(8)), 2, rows)
    assert [row["item"] for row in colbench.read_jsonl(path, {})] == list(range(8))
    assert played == [0, 1, 2, 3, 4, 5, 4, 5, 6, 7]  # the batch that was cut, again


# ---------------------------------------------------------------------------------------------------------
# End to end, at a size that shows nothing but that it works
TASKS = [Task(t.problem_description, t.ground_truth + f"  # {SENTINEL}", t.test_cases) for t in miniature_tasks("train", 4)]
SMOKE = ["--device", "cpu", "--num-tasks", "3", "--candidates", "4", "--turn-fraction", "0.5", "--max-new-tokens", "8",
         "--critic-epochs", "1", "--rft-epochs", "1", "--mt-dpo-epochs", "1", "--max-turns", "3"]  # fmt: skip
MADE = {".lock", "base", "trajectories.jsonl", "trajectory_pairs.jsonl", "critic", "candidates.jsonl", "turn_pairs.jsonl", "actor", "rft",
        "mt-dpo", "metrics.jsonl", "results.json", "timings.json", "settings.json", "report.html"}  # fmt: skip
EVALS = {f"eval_{method}{greedy}.jsonl" for method in METHODS for greedy in ("", "_greedy")}
MODELS = ("base", "critic", "actor", "rft", "mt-dpo")


def offline_dialogues() -> list[Trajectory]:
    """Two dialogues for each task, one that solves it and one that gives up; no reward is written down yet."""
    made = []
    for good in (True, False):
        for task in TASKS:
            code = task.ground_truth if good else "def fee(x):\n    return None"
            code = code.replace(f"  # {SENTINEL}", "")
            made.append(played(task, "what is it?", "i do not know.", f"{ANSWER_MARKER}\n{code}", answer=code))
    return made


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A whole run; every prompt that was tokenized in it, with the product that it was for and who asked."""
    folder = tmp_path_factory.mktemp("smoke")
    colbench.save_trajectories(folder / "offline.jsonl", offline_dialogues())
    colbench.write_jsonl(folder / "tasks.jsonl", [vars(task) for task in TASKS])
    prompts, making = [], ["nothing"]
    patch = pytest.MonkeyPatch()

    def spy(who):
        def prompt(tokenizer, messages):
            text = chat_prompt(tokenizer, messages)
            prompts.append((making[-1], who, text))
            return text

        return prompt

    def make(run, product, build):
        making.append(product)
        make_for_real(run, product, build)
        making.append("nothing")

    make_for_real = Run.make
    patch.setattr(Run, "make", make)
    patch.setattr(sweet_rl, "chat_prompt", spy("scoring"))
    patch.setattr(simulator, "chat_prompt", spy("sampling"))
    small = dataclasses.replace(sweet_rl.MINIATURES["backend"], warm_up_tasks=70)
    patch.setitem(sweet_rl.MINIATURES, "backend", small)
    patch.setattr(sweet_rl, "WARM_UP_EPOCHS", 1)
    argv = [*SMOKE, "--out", str(folder / "out"), "--trajectories", str(folder / "offline.jsonl")]
    argv += ["--tasks", str(folder / "tasks.jsonl")]
    with patch.context() as printed:
        lines = []
        printed.setattr("builtins.print", lambda *words, **_: lines.append(" ".join(map(str, words))))
        code = main(argv)
    yield {"code": code, "out": folder / "out", "argv": argv, "prompts": prompts, "printed": "\n".join(lines)}
    patch.undo()


@pytest.fixture
def rerun(finished, tmp_path, capsys):
    """`rerun(*flags, drop=names)`: main again, in a copy of the finished folder; returns (code, stdout, stderr)."""
    out = tmp_path / "out"
    shutil.copytree(finished["out"], out)

    def again(*flags, drop=(), forget=()):
        for name in drop:
            shutil.rmtree(out / name) if (out / name).is_dir() else (out / name).unlink()
        records = json.loads((out / "settings.json").read_text())
        (out / "settings.json").write_text(json.dumps({k: v for k, v in records.items() if k not in {*drop, *forget}}))
        again.before = digests(out)
        capsys.readouterr()
        code = main([*finished["argv"], "--out", str(out), *map(str, flags)])
        again.after = digests(out)
        return code, *capsys.readouterr()

    again.out = out
    return again


def digests(folder) -> dict[str, str]:
    """What is in a folder, but for the times and the report, which every run writes anew."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name not in ("timings.json", "report.html")]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def rows_of(finished, name):
    return colbench.read_jsonl(finished["out"] / name, {})


def test_the_smoke_run_makes_every_file(finished):
    assert finished["code"] == 0
    assert {path.name for path in finished["out"].iterdir()} == MADE | EVALS
    assert set(json.loads((finished["out"] / "timings.json").read_text())) == set(STAGES)
    assert set(json.loads((finished["out"] / "settings.json").read_text())) == (MADE | EVALS) - {
        ".lock", "metrics.jsonl", "results.json", "timings.json", "settings.json", "report.html"
    }  # fmt: skip


def test_results(finished):
    methods = json.loads((finished["out"] / "results.json").read_text())["methods"]
    assert list(methods) == list(METHODS)
    for figures in methods.values():
        for part in (figures, figures["greedy"]):
            assert part["n"] == 3 and 0 <= part["success"] <= part["tests_passed"] <= 1
            low, high = part["success_interval"]
            assert 0 <= low <= part["success"] <= high <= 1


def test_the_offline_dialogues_get_their_rewards(finished):
    """The first three tasks in order, two dialogues each; k blocks of n rows, as in the official files."""
    found = colbench.load_trajectories(finished["out"] / "trajectories.jsonl")
    assert [t.task for t in found] == TASKS[:3] * 2
    assert [t.reward for t in found[:3]] == [1.0] * 3 and all(t.reward < 1 for t in found[3:])
    assert len(rows_of(finished, "trajectory_pairs.jsonl")) == 3


def test_candidates_and_turn_pairs(finished):
    """Half of the six dialogues, two turns each."""
    rows = rows_of(finished, "candidates.jsonl")
    assert len(rows) == 6
    for row in rows:
        assert len(row["candidates"]) == len(row["advantages"]) == len(row["truncated"]) == 4
        assert row["messages"][0]["role"] == "system" and row["messages"][-1]["role"] == "user"
        assert all(math.isfinite(advantage) for advantage in row["advantages"])
    assert any(row["advantages"][0] for row in rows)
    for row in rows_of(finished, "turn_pairs.jsonl"):
        assert row["prompt"] in [r["messages"] for r in rows]
        assert row["chosen"][0]["role"] == row["rejected"][0]["role"] == "assistant"


def test_evaluations_are_official_rows_of_at_most_three_turns(finished):
    longest = {}
    for name in EVALS:
        found = colbench.load_trajectories(finished["out"] / name)
        assert [t.task for t in found] == TASKS[:3] and all(0 <= t.reward <= 1 for t in found)
        longest[name] = max(len(t.turns) for t in found)
    assert {longest[name] for name in EVALS if "single-turn" in name} == {1} and 1 < max(longest.values()) <= 3


def test_model_folders_load_like_any_other(finished):
    weights = {}
    for name in MODELS:
        model = AutoModelForCausalLM.from_pretrained(finished["out"] / name)
        tokenizer = AutoTokenizer.from_pretrained(finished["out"] / name)
        assert tokenizer.chat_template and model.dtype == torch.float32 and model.config.model_type == "llama"
        assert model.generation_config.eos_token_id == tokenizer.eos_token_id
        weights[name] = model.model.embed_tokens.weight
    for name in MODELS[1:]:
        assert not torch.equal(weights[name], weights["base"])


def test_metrics_name_their_run(finished):
    rows = rows_of(finished, "metrics.jsonl")
    assert {row["run"] for row in rows} == {"warm-up", "critic", "actor", "rft", "mt-dpo"}
    assert all({"step", "loss", "lr", "grad_norm", "nll"} <= set(row) for row in rows)


def test_what_is_printed(finished):
    text = finished["printed"]
    for words in [*METHODS, "success %", "before training", "after training", "device: cpu", "weights float32", *STAGES]:
        assert words in text
    assert len(re.findall(r"\n\[[+-]\d+\.\d\d\] +agent:", text)) >= 2 and text.count("human:") >= 2


def test_c_never_reaches_the_actor(finished):
    """A word of the hidden solution is in the critic's prompts and in no prompt and no training text of an agent."""
    seen = {}
    for product, who, text in finished["prompts"]:
        seen.setdefault((product, who), set()).add(SENTINEL in text)
    assert seen["critic", "scoring"] == seen["candidates.jsonl", "scoring"] == seen["nothing", "scoring"] == {True}
    without_c = [("candidates.jsonl", "sampling"), ("actor", "scoring"), ("rft", "scoring"), ("mt-dpo", "scoring")]
    for key in without_c + [(name, "sampling") for name in EVALS]:
        assert seen[key] == {False}
    assert SENTINEL not in (finished["out"] / "turn_pairs.jsonl").read_text()
    for name in ("trajectory_pairs.jsonl", "candidates.jsonl"):
        for row in rows_of(finished, name):
            assert SENTINEL in row.pop("ground_truth") and SENTINEL not in json.dumps(row)


def test_what_is_there_is_not_made_again(rerun):
    code, out, _ = rerun()
    assert code == 0 and rerun.after == rerun.before
    assert out.count("there already") == len(EVALS) + 9


def test_what_is_missing_is_made_again_and_nothing_else(rerun):
    code, _, _ = rerun(drop=["actor", "eval_sweet.jsonl"])
    changed = {name for name in rerun.after if rerun.after[name] != rerun.before.get(name)}
    assert code == 0 and set(rerun.before) <= set(rerun.after)
    assert {name.split("/")[0] for name in changed} == {"actor", "eval_sweet.jsonl", "metrics.jsonl", "settings.json"}


ALL_BUT_BASE = sorted((MADE | EVALS) - {".lock", "base", "settings.json"})


def test_a_run_whose_agent_is_a_server(rerun):
    """It plays the untouched agent and no other, and never reads c; a turn that it refuses candidates for is left out."""
    refuses = lambda messages: messages[-1]["content"] != "hi"  # at first all but the question whether it answers  # noqa: E731

    def answer(body, number):
        choices = [choice(f"hm {number}.{i}")["choices"][0] for i in range(body["n"])]
        return (400, "too long") if refuses(body["messages"]) else {"choices": choices}

    def players(name):
        turns = itertools.chain.from_iterable(t.turns for t in colbench.load_trajectories(rerun.out / name))
        return {(turn.action["output"][:2] == "hm", turn.action["input"] == "") for turn in turns}

    with server(answer) as (url, requests):
        flags = ["--agent", url, "--agent-model", "gpt", "--methods", "single-turn,zero-shot,sweet", "--generate-batch", 2]
        code, _, err = rerun(*flags, drop=ALL_BUT_BASE)
        assert code == 2 and "candidates.jsonl: no turn of a batch got candidates" in err and err.count("\n") == 1
        second = [user(TASKS[1].problem_description), agent("what is it?"), user("i do not know.")]
        refuses = lambda messages: messages[1:] == second  # noqa: E731
        code, out, err = rerun(*flags)
    assert code == 0 and "1 of 6 turns left out" in out, err
    rows = rows_of({"out": rerun.out}, "candidates.jsonl")
    assert len(rows) == 5 and all(len(set(row["candidates"])) == 4 and "hm" in row["candidates"][3] for row in rows)
    assert players("eval_zero-shot.jsonl") == players("eval_single-turn_greedy.jsonl") == {(True, True)}
    assert players("eval_sweet.jsonl") == {(False, False)}
    assert {request["body"]["model"] for request in requests} == {"gpt"} and SENTINEL not in json.dumps(requests)
    code, _, err = rerun("--methods", "zero-shot")
    assert code == 2 and f"agent was {url}, is None" in err and err.count("\n") == 1
    given = ["--agent", "http://127.0.0.1:9/v1", "--stages", "collect,pairs,critic"]  # nobody is there, nobody is needed
    assert rerun(*given, "--methods", "sweet", drop=["trajectories.jsonl", "trajectory_pairs.jsonl", "critic"])[0] == 0


def test_dialogues_of_another_models_agent_train(rerun, tmp_path, encoder, tokenizer):
    """Table 4 of the paper: its prompts and its raw outputs are unknown, and its texts are none of this tokenizer's phrases."""
    text, rows = "Wie groß? 🚕\r\n\t½  ", [colbench.trajectory_row(t) for t in offline_dialogues()]
    for message in itertools.chain.from_iterable(row["dialogue_history"] for row in rows):
        message.pop("input", None), message.pop("output", None)
        if message["content"] == "what is it?":
            message["content"] = text
    colbench.write_jsonl(tmp_path / "other.jsonl", rows)
    stages = ",".join(STAGES[:-1])
    code, _, err = rerun("--trajectories", tmp_path / "other.jsonl", "--stages", stages, drop=ALL_BUT_BASE)
    assert code == 0 and {f"{name}/model.safetensors" for name in MODELS} <= set(rerun.after), err
    assert text in {m["content"] for row in rows_of({"out": rerun.out}, "trajectory_pairs.jsonl") for m in row["chosen"]}
    assert tokenizer.decode(encoder.action(agent(text))[:-1]) == text



@pytest.mark.parametrize("kind", ["regression", "value"])
def test_a_run_with_a_head_critic(rerun, kind):
    drop = ["critic", "candidates.jsonl", "turn_pairs.jsonl", "actor", "eval_sweet.jsonl", "eval_sweet_greedy.jsonl"]
    code, out, err = rerun("--critic", kind, "--critic-lr", "1e-2", drop=drop)
    assert code == 0 and "critic/head.safetensors" in rerun.after, err
    rows = colbench.read_jsonl(rerun.out / "candidates.jsonl", {})
    assert len({advantage for row in rows for advantage in row["advantages"]}) > 4
    assert "reward_chosen" in out and "nll" not in out.split("critic: ")[1].split("\n")[0]


def test_a_run_with_best_of_n(rerun, finished):
    """Sampled dialogues are played anew, by the critic's choice; greedy ones, which have none, stay as they are."""
    code, out, err = rerun("--best-of", "3", "--methods", "zero-shot", drop=["eval_zero-shot.jsonl"])
    assert code == 0, err
    changed = {name for name in rerun.after if rerun.after[name] != rerun.before.get(name)}
    assert changed - {"results.json"} == {"eval_zero-shot.jsonl", "settings.json"}
    record = json.loads((rerun.out / "settings.json").read_text())["eval_zero-shot.jsonl"]
    assert record["best_of"] == 3 and "critic_beta" in record


TRAINED = ["critic", "candidates.jsonl", "turn_pairs.jsonl", "actor", "rft", "mt-dpo",
           *(f"eval_{m}{g}.jsonl" for m in ("sweet", "rft", "mt-dpo") for g in ("", "_greedy"))]  # fmt: skip


@pytest.mark.parametrize("kind", ["logprob", "regression"])
def test_a_run_with_adapters(rerun, kind):
    """All stages over a base that stays as it is; the README's command merges the actor's adapters with it."""
    pytest.importorskip("peft")
    code, _, err = rerun("--lora", 4, "--lora-lr", "1e-2", "--critic", kind, drop=TRAINED)
    assert code == 0, err
    base = {name: digest for name, digest in rerun.before.items() if name.startswith("base/")}
    assert base.items() <= rerun.after.items()
    for name in MODELS[1:]:
        assert {path.name for path in (rerun.out / name).glob("*.safetensors")} - {"head.safetensors"} == {"adapter_model.safetensors"}
    merge = re.search(r'python -c "(import peft;.*)"', (Path(sweet_rl.__file__).parent / "README.md").read_text())[1]
    exec(merge.replace("out/backend-tiny/actor", str(rerun.out / "actor")).replace("'merged'", f"'{rerun.out / 'merged'}'"))
    merged, base_model = (AutoModelForCausalLM.from_pretrained(rerun.out / name).state_dict() for name in ("merged", "base"))
    changed = {key for key in merged if not torch.equal(merged[key], base_model[key])}
    assert merged.keys() == base_model.keys() and changed and all("_proj" in key for key in changed)
    records = json.loads((rerun.out / "settings.json").read_text())
    assert all(records[name]["lora"] == 4 for name in MODELS[1:]) and records["critic"]["critic_lr"] == 1e-2
    code, _, err = rerun()
    assert code == 2 and "lora was 4, is None" in err


@pytest.mark.parametrize("file, content", [("adapter_model.safetensors", b""), ("adapter_config.json", b"{")])
def test_a_broken_adapter_is_one_line(like_a_real_one, tokenizer, file, content):
    """Of its own folder as of a sharded model's, which takes its shape alone."""
    pytest.importorskip("peft")
    sweet = like_a_real_one("--lora", 4)
    folder = sweet.run.path("critic")
    sweet_rl.save_model(sweet.model("base", train=True)[0], tokenizer, folder)
    (folder / file).write_bytes(content)
    bases = [sweet.model("base")[0], copy.deepcopy(sweet.model("base")[0]).to("meta")]
    for base in bases if file == "adapter_config.json" else bases[:1]:
        with pytest.raises(colbench.InputError, match=f"model {folder}: cannot be loaded") as refused:
            sweet_rl.adapted(base, folder)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("precision, near", [("float32", 1e-4), ("bfloat16", 0.1)])
def test_adapters_share_one_frozen_base(like_a_real_one, tokenizer, encoder, precision, near):
    """Bit-unchanged by training, the reference with adapters off; the critic scores like its merged copy."""
    peft = pytest.importorskip("peft")
    sweet, batch = like_a_real_one("--lora", 4, "--precision", precision), dialogue_pairs(encoder)
    sweet.trainer.dtype = torch.float32  # exact comparisons
    base = sweet.model("base")[0]
    before = {name: weight.clone() for name, weight in base.state_dict().items()}
    critic = sweet.model("base", train=True)[0]
    with torch.no_grad():
        assert torch.equal(*(sweet.trainer.log_probs(model, batch)[0] for model in (base, critic)))  # B starts at 0
    sweet.trainer.add_reference(critic, batch, "critic")
    sweet.trainer.train(critic, batch, critic_objective(5.0, 0.01), "critic", 1e-1, 10, 1)
    shared = {weight.data_ptr() for weight in base.parameters()}
    frozen = [weight for weight in critic.parameters() if weight.data_ptr() in shared]
    assert len(frozen) == len(shared) and {weight.dtype for weight in frozen} == {sweet.dtype}
    assert {weight.dtype for weight in critic.parameters() if weight.requires_grad} == {torch.float32}
    assert all(torch.equal(weight, before[name]) for name, weight in base.state_dict().items())

    sweet_rl.save_model(critic, tokenizer, sweet.run.path("critic"))
    loaded, merged = sweet.model("critic")[0], peft.PeftModel.from_pretrained(copy.deepcopy(base), sweet.run.path("critic"))
    assert {w.dtype for name, w in loaded.named_parameters() if "lora" in name} == {torch.float32}
    rows, merged = candidate_rows(2), merged.float().merge_and_unload()
    trained, saved = (sweet.score(model, base, encoder, rows) for model in (critic, loaded))
    assert trained == saved and trained[0][0] != 0
    torch.testing.assert_close(sweet.score(merged, base.float(), encoder, rows), trained, atol=near, rtol=near)
    with loaded.disable_adapter(), torch.no_grad():
        assert torch.equal(*(sweet.trainer.log_probs(model, batch)[0] for model in (base, loaded)))


def test_the_same_seed_makes_the_same_files(rerun, finished):
    files = ["trajectory_pairs.jsonl", "critic", "candidates.jsonl", "turn_pairs.jsonl", "actor"]
    files += ["eval_sweet.jsonl", "eval_sweet_greedy.jsonl"]
    code, _, _ = rerun(drop=files)
    before = digests(finished["out"])
    changed = {name for name in rerun.after if rerun.after[name] != before[name]}
    assert code == 0 and changed <= {"metrics.jsonl", "settings.json"}  # the order of their lines


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--critic-beta", "99"], ["critic", "critic_beta", "99"]),
        (["--seed", "5"], ["seed"]),
        (["--candidates", "3"], ["candidates.jsonl", "candidates"]),
        (["--actor-lr", "1"], ["actor_lr"]),
        (["--no-hint"], ["critic", "no_hint was False, is True"]),
        (["--best-of", "3"], ["eval_single-turn.jsonl", "best_of was None, is 3"]),
        (["--num-tasks", "2"], ["num_tasks"]),
        (["--stages", "evaluate", "--critic-beta", "99"], ["eval_sweet", "critic_beta"]),
    ],
    ids=str,
)
def test_files_of_other_settings_are_refused_and_kept(rerun, flags, words):
    code, out, err = rerun(*flags)
    assert code != 0 and rerun.after == rerun.before
    assert err.count("\n") == 1 and err.startswith("error: ")
    assert [word for word in words if word not in err] == []


def test_a_later_stage_does_not_build_on_files_of_other_settings(rerun):
    """turn_pairs.jsonl is there, made from 4 candidates: with --candidates 3 it is not what the actor should read."""
    code, _, err = rerun("--stages", "actor", "--methods", "sweet", "--candidates", "3", drop=["actor"])
    assert code != 0 and "candidates" in err and rerun.after == rerun.before


@pytest.mark.parametrize(
    "flags",
    [
        ["--micro-batch", "3", "--generate-batch", "2"],
        ["--methods", "zero-shot"],
        ["--methods", "zero-shot,rft", "--actor-lr", "1"],  # not upstream of these
        ["--stages", "pairs,critic"],
    ],
    ids=str,
)
def test_settings_that_shape_no_file_are_free_to_change(rerun, flags):
    code, _, _ = rerun(*flags)
    assert code == 0 and rerun.after == rerun.before  # the figures of the other methods, too


def test_a_damaged_metrics_file_costs_its_curves_only(rerun):
    (rerun.out / "metrics.jsonl").write_text('{"run": "critic", "step": 1}\n{"ru')
    code, out, _ = rerun(drop=["eval_sweet.jsonl"])
    assert code == 0 and "metrics.jsonl, line 2" in out and "eval_sweet.jsonl" in rerun.after


def test_another_content_behind_the_same_name_is_another_setting(rerun, tmp_path):
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(sweet_rl.TINY_PROMPT)
    evals = sorted(EVALS)
    made = ("trajectories.jsonl", "trajectory_pairs.jsonl", "critic", "candidates.jsonl", "turn_pairs.jsonl", "actor", "rft", "mt-dpo")
    flags = ["--agent-prompt", prompt, "--stages", "collect"]
    assert rerun(*flags, drop=[*evals, *made])[0] == 0
    assert rerun(*flags)[0] == 0 and rerun.after == rerun.before
    prompt.write_text("answer at once.")
    code, _, error = rerun(*flags)
    assert code == 2 and "trajectories.jsonl was made with other settings (agent_prompt was" in error and error.count("\n") == 1
    assert rerun.after == rerun.before


@pytest.mark.parametrize("flags, named", [(["--seed", "1"], "seed was 0, is 1"), (["--task", "frontend"], "task was backend")])
def test_a_base_put_there_by_hand_hides_no_other_setting(rerun, flags, named):
    made = sorted((MADE | EVALS) - {"base", "settings.json", "timings.json", ".lock"})
    assert rerun("--stages", "collect", drop=made, forget=["base"])[0] == 0
    code, _, error = rerun("--stages", "collect", *flags)
    assert code == 2 and named in error and rerun.after == rerun.before


OWN_PAIR = {"prompt": [SYSTEM, REQUEST], "chosen": [agent("what is the rate?")], "rejected": [agent("hello")]}
ONLY_BASE = sorted((MADE | EVALS) - {".lock", "base", "settings.json", "timings.json", "turn_pairs.jsonl", "report.html"})


def test_a_file_put_there_by_hand_is_used(rerun):
    """Someone's own turn pairs train an actor, without a critic, and are read again when they change."""
    own = rerun.out / "turn_pairs.jsonl"
    colbench.write_jsonl(own, [OWN_PAIR] * 3)
    flags = ["--methods", "sweet", "--stages", "turn-pairs,actor"]
    code, out, _ = rerun(*flags, drop=ONLY_BASE, forget=["turn_pairs.jsonl"])
    assert code == 0 and "turn_pairs.jsonl: there already, put there by hand" in out
    assert rerun.after["turn_pairs.jsonl"] == rerun.before["turn_pairs.jsonl"] and "actor/model.safetensors" in rerun.after
    assert "3 examples" in out or "1 examples" in out
    colbench.write_jsonl(own, [OWN_PAIR] * 2)
    code, _, err = rerun(*flags)
    assert code != 0 and "by hand" in err and rerun.after == rerun.before


def test_an_actor_of_ones_own_pairs_is_evaluated_without_a_critic(rerun):
    colbench.write_jsonl(rerun.out / "turn_pairs.jsonl", [OWN_PAIR])
    flags = ["--methods", "zero-shot,sweet", "--stages", "actor,evaluate"]
    code, _, err = rerun(*flags, drop=ONLY_BASE, forget=["turn_pairs.jsonl"])
    assert (code, err.count("error")) == (0, 0)
    assert set(json.loads((rerun.out / "results.json").read_text())["methods"]) == {"zero-shot", "sweet"}


def test_a_missing_upstream_file_names_the_stage_to_run(rerun):
    code, _, err = rerun("--stages", "actor", drop=["actor", "turn_pairs.jsonl"])
    assert code != 0 and "turn_pairs.jsonl is missing" in err and "turn-pairs" in err


def test_collecting_with_the_scripted_human(finished, tmp_path):
    """Two blocks of the first three training tasks, the same rows each time."""
    files = []
    for name in ("a", "b"):
        out = tmp_path / name
        out.mkdir()
        shutil.copytree(finished["out"] / "base", out / "base")
        assert main([*SMOKE, "--out", str(out), "--stages", "collect", "--dialogues", "2"]) == 0
        files.append((out / "trajectories.jsonl").read_bytes())
    found = colbench.load_trajectories(out / "trajectories.jsonl")
    assert files[0] == files[1] and [t.task for t in found] == miniature_tasks("train", 3) * 2
    for trajectory in found:
        assert 1 <= len(trajectory.turns) <= 3 and 0 <= trajectory.reward <= 1
        assert all(turn.action["input"].startswith("<|system|>") for turn in trajectory.turns)


@pytest.mark.parametrize("human", [[], ["--simulator", "scripted"]], ids=["itself", "scripted"])
def test_a_real_model_folder_goes_the_same_way(finished, tmp_path, human):
    """The tiny model's folder given as --model: the paper's settings, its own human; no model is built."""
    tasks = tmp_path / "tasks.jsonl"
    colbench.write_jsonl(tasks, [vars(task) for task in TASKS])
    argv = ["--model", finished["out"] / "base", "--tasks", tasks, "--num-tasks", "1", "--dialogues", "2", "--max-turns", "2"]
    argv += ["--max-new-tokens", "8", "--device", "cpu", "--stages", "collect", "--out", tmp_path / "out", *human]
    assert main([str(word) for word in argv]) == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        ".lock", "trajectories.jsonl", "settings.json", "timings.json", "report.html"
    }  # fmt: skip
    assert [t.task for t in colbench.load_trajectories(tmp_path / "out" / "trajectories.jsonl")] == TASKS[:1] * 2


def test_a_run_with_a_flaky_server_comes_to_its_end(rerun, monkeypatch):
    """Every dialogue is complete or says why not; those are counted, have no reward, and the others have one."""
    times = Counter()

    def answer(body, _):
        times[text := json.dumps(body)] += 1
        rng = random.Random(f"{times[text]} {text}")
        return rng.choice([sent for sent, _ in FAULTS.values()]) if rng.random() < 0.3 else choice("the rate is 3.")

    monkeypatch.setattr(simulator.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(sweet_rl, "ChatServer", functools.partial(simulator.ChatServer, timeout=0.3))
    with server(answer) as (url, _):
        code, out, err = rerun("--simulator", url, "--num-tasks", 4, drop=ALL_BUT_BASE)
    methods = json.loads((rerun.out / "results.json").read_text())["methods"]
    found = {name: colbench.load_trajectories(rerun.out / name) for name in sorted(EVALS)}
    failed = sum(t.failed is not None for trajectories in found.values() for t in trajectories)
    assert code == 0 and 0 < failed == sum(f["failed"] + f["greedy"]["failed"] for f in methods.values()) and "failed" in out, err
    for t in itertools.chain.from_iterable(found.values()):
        assert (t.failed is None) == (t.reward is not None) and (t.failed is None or "does not answer" in t.failed)


@pytest.mark.parametrize("kind", ["code in the model", "code in the tokenizer", "pickled weights", "pickled head"])
def test_a_folder_of_someone_else_runs_no_code(rerun, tmp_path, kind):
    """Code and pickles that would leave a file behind; one line each, and nothing is run."""
    base, ran = rerun.out / "base", tmp_path / "ran"
    evil = f"open({str(ran)!r}, 'w')\n"
    (base / "evil.py").write_text(evil)
    pickled = b"cbuiltins\nexec\n(V" + evil.strip().encode() + b"\ntR."
    if kind.startswith("pickled"):
        (base / "pytorch_model.bin").write_bytes(pickled)
        (base / "model.safetensors").unlink()
        if kind == "pickled head":
            shutil.copy(rerun.out / "critic" / "model.safetensors", base / "model.safetensors")
            (base / "head.safetensors").write_bytes(pickled)
    else:
        name = "config.json" if kind == "code in the model" else "tokenizer_config.json"
        config = json.loads((base / name).read_text()) | {"model_type": "evil", "tokenizer_class": "Evil"}
        auto = {key: f"evil.{key}" for key in ("AutoConfig", "AutoModelForCausalLM")} | {"AutoTokenizer": ["evil.A", "evil.B"]}
        (base / name).write_text(json.dumps(config | {"auto_map": auto}))
    code, _, err = rerun("--methods", "zero-shot", drop=["eval_zero-shot.jsonl"])
    assert not ran.exists() and code == 2 and err.startswith("error: ") and err.count("\n") == 1, err
    assert set(rerun.after) <= set(rerun.before)


def test_spaces_between_stages_and_methods_are_fine():
    s = settings("--stages", "evaluate, pairs", "--methods", " zero-shot ,sweet")
    assert (s.stages, s.methods) == ("evaluate,pairs", "zero-shot,sweet")


# ---------------------------------------------------------------------------------------------------------
# The report
def report_data(page: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page)[1])


def test_the_report_holds_the_run(finished):
    """Table, curves, both dialogues of each task with an advantage a turn, ranked candidates; no path of this machine."""
    page = (finished["out"] / "report.html").read_text()
    data = report_data(page)
    results = json.loads((finished["out"] / "results.json").read_text())["methods"]
    assert {name: f["n"] for name, f in data["methods"].items()} == {name: 3 for name in results}
    assert set(data["curves"]) == {"warm-up", "critic", "actor", "rft", "mt-dpo"}
    assert [row["task"] for row in data["dialogues"]] == [1, 2, 3] and "out" not in data["settings"]
    for side, method in (("before", "zero-shot"), ("after", "sweet")):
        played = colbench.load_trajectories(finished["out"] / f"eval_{method}.jsonl")
        for row, trajectory in zip(data["dialogues"], played, strict=True):
            assert row["reference"] == trajectory.task.ground_truth and row[side]["answer"] == trajectory.answer
            for shown, message in zip(row[side]["dialogue"], trajectory.dialogue, strict=True):
                assert shown["content"] == message["content"]
                assert isinstance(shown.get("advantage"), float) == (message["role"] == "assistant")
    assert len(data["turns"]) == 6 and len(data["turns"][0]["candidates"]) == 4
    printed = float(re.search(r"\[([+-]\d+\.\d\d)\] +agent:", finished["printed"])[1])
    row = next((row for row in data["dialogues"] if row["first_better"]), data["dialogues"][0])
    assert row["before"]["dialogue"][1]["advantage"] == pytest.approx(printed, abs=0.006)


def test_a_dialogue_scored_whole_and_turn_by_turn(sweet, monkeypatch, model, tokenizer, encoder):
    """What the report shows of a turn is what `score` gives to it as a candidate."""
    models = {"critic": model, "base": small_reference(model)}
    monkeypatch.setattr(sweet, "model", lambda product, train=False: (models[product], tokenizer, encoder))
    dialogues = [
        played(Task("write fee(x) for a taxi.", CODE), "what?", "the rate is 3.", "ok then"),
        played(Task("t", "c"), "x"),
    ]
    assert [m.get("advantage") for m in sweet.scored_dialogues(dialogues)[0]["dialogue"]] == [None] * 4  # no critic yet
    sweet.run.path("critic").mkdir()
    for trajectory, shown in zip(dialogues, sweet.scored_dialogues(dialogues), strict=True):
        rows = [
            {
                "messages": sweet.with_system(turn.history),
                "candidates": [turn.action["content"]],
                "ground_truth": trajectory.task.ground_truth,
            }
            for turn in trajectory.turns
        ]
        wanted = [score for (score,) in sweet.score(*models.values(), encoder, rows)]
        assert [m["advantage"] for m in shown["dialogue"][1::2]] == pytest.approx(wanted, abs=1e-5) and wanted[0] != 0


def test_a_curve_has_at_most_so_many_points():
    rows = [{"run": "a", "step": i, "loss": 2.0 * i} for i in range(1, 6)] + [{"run": "b", "step": 1, "nll": 3.0}]
    curves = sweet_rl.training_curves(rows, points=3)
    assert curves == {"a": {"step": [1.5, 3.5, 5.0], "loss": [3.0, 7.0, 10.0]}, "b": {"step": [1.0], "nll": [3.0]}}


HOSTILE = [
    "</script><script>document.title = 'ran'</script>",
    "<!--<script>",
    "<img src=x onerror=\"document.title = 'ran'\">",
    "{nonce} {data}",
    "\u2028 & \ud800",
]


def hostile_page() -> str:
    """A report in which every text is hostile."""
    figures = {"success": 0.5, "success_interval": [0.4, 0.6], "tests_passed": 0.5, "tests_passed_interval": [0.4, 0.6], "n": 3}
    text = " ".join(HOSTILE)
    side = {"reward": 0.5, "answer": text, "dialogue": [user(text), agent(text, advantage=float("nan")), agent(text, advantage=-1.0)]}
    data = {
        "settings": {"task": text, "model": text, "seed": 0},
        "methods": {text: figures | {"greedy": figures}},
        "columns": {"success": text, "tests_passed": text},
        "curves": {text: {"step": [1, 2], "loss": [float("inf"), 0.123456], text: [1.0, 1.0]}},
        "dialogues": [{"task": 1, "first_better": True, "reference": text, "before": side, "after": side}],
        "turns": [{"messages": [user(text)], "candidates": [text] * 2, "advantages": [1.0, 2.0], "ground_truth": text}],
    }
    template = (Path(sweet_rl.__file__).parent / "assets" / "report.html").read_text()
    return sweet_rl.fill_report(template, data)


def test_what_a_model_wrote_cannot_leave_its_element():
    page, plain = hostile_page(), (Path(sweet_rl.__file__).parent / "assets" / "report.html").read_text()
    for char in "<>":
        assert page.count(char) == plain.count(char)
    data = report_data(page)
    assert data["dialogues"][0]["reference"] == " ".join(HOSTILE)
    assert data["curves"][" ".join(HOSTILE)]["loss"] == [None, 0.1235]
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval|https?://(?!www\.w3\.org/2000/svg)", plain)
    assert "default-src 'none'" in plain and "unsafe-inline" not in plain


def test_a_browser_runs_nothing_of_it(tmp_path):
    sync_api = pytest.importorskip("playwright.sync_api")
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if not browser:
        pytest.skip("no chromium here")
    (tmp_path / "report.html").write_text(hostile_page(), encoding="utf-8")
    with sync_api.sync_playwright() as playwright:
        page = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"]).new_page()
        problems, asked = [], []
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto((tmp_path / "report.html").as_uri())
        assert page.title() == "SWEET-RL: report of a run" and page.locator("img").count() == 0
        assert (problems, len(asked)) == ([], 1)
        assert page.locator("pre").first.text_content().startswith(HOSTILE[0])
        assert page.locator("polyline").count() == 2 and page.locator("script").count() == 2
        scores = [float(text) for text in page.locator(".message span").all_text_contents()]
        assert scores == [-1.0, -1.0, 2.0, 1.0]  # both dialogues, then the candidates from the best on


# ---------------------------------------------------------------------------------------------------------
# Will it fit?  Llama-3.1-8B, from its config.json alone
@pytest.fixture(scope="module")
def config_only(tmp_path_factory):
    folder = tmp_path_factory.mktemp("Llama-3.1-8B-Instruct")
    config = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256,
              "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    "gpu, flags, chosen, lora",
    [
        (256, [], "", None),
        (80, [], "--lora 16 --micro-batch 2 --generate-batch 16", 16),
        (80, ["--lora", "8"], "--micro-batch 2 --generate-batch 16", 8),
        (24, ["--max-length", "2048"], "--lora 16 --micro-batch 2 --generate-batch 4", 16),
        (24, [], "with --lora 16 --micro-batch 2 --generate-batch 4 --max-length 2048 it would fit", None),
        (8, [], "with --lora 16 --micro-batch 2 --generate-batch 4 --max-length 1024 it would still need", None),
        (8, ["--max-length", "512"], "it would still need", None),
    ],
    ids=str,
)
def test_what_fits_is_chosen_or_named(config_only, tmp_path, monkeypatch, capsys, gpu, flags, chosen, lora):
    """The sizes that cards have; nothing is loaded, nothing is made."""
    monkeypatch.setattr(sweet_rl, "memory_here", lambda device: gpu * 2**30)
    monkeypatch.setattr(sweet_rl, "load_model", None)
    argv = ["--model", str(config_only), "--device", "cpu", "--precision", "bfloat16", "--out", str(tmp_path / "out"), "--plan", *flags]
    code = main(argv)
    out, err = capsys.readouterr()
    refused = "it would" in chosen
    assert code == (2 if refused else 0) and (chosen in err and err.count("\n") == 3 if refused else not err)
    assert "8.03 B parameters" in out and not (tmp_path / "out").exists()
    if not refused:
        assert f"with {chosen}, chosen therefore" in out if chosen else "too much" not in out
        settings = sweet_rl.plan(parse_settings(argv), argv, CPU, torch.bfloat16)
        assert settings.lora == lora and settings.critic_lr == (2e-6 if lora else 2e-7)


def test_the_plan_counts_what_is_known(config_only):
    """16 bytes a parameter in full training; 128 kB a token in the cache; frozen weights in bfloat16 once."""
    def needed(*flags):
        more = ["--max-length", 1024, "--generate-batch", 8, "--simulator", "http://h/v1", *flags]
        return sweet_rl.memory_needed(settings("--model", config_only, *more), torch.bfloat16)

    size, full, lora = 8_030_261_248, needed(), needed("--lora", 16)
    assert full["training"][:2] == [4 * size, 12 * size] and full["candidates"][0] == 2 * 2 * size
    adapters = 41_943_040
    assert lora["training"][:2] == [2 * size + 4 * adapters, 12 * adapters] and lora["candidates"][0] == 2 * size + 4 * adapters
    assert full["dialogues"][3] == 8 * 1024 * 2**17 and full["dialogues"][0] == 2 * size
    assert set(needed("--stages", "pairs,evaluate")) == {"dialogues"} and not needed("--stages", "pairs")
    served = functools.partial(needed, "--agent", "http://h/v1")
    assert set(served()) == {"training", "their scores", "dialogues"} and not served("--methods", "zero-shot")


def test_the_plan_counts_a_human_who_sees(config_only, tmp_path):
    """A vision-language model beside the agent, from its config.json alone."""
    from transformers import Qwen2VLConfig

    Qwen2VLConfig().save_pretrained(tmp_path)
    flags = ["--task", "frontend", "--tasks", "tasks.jsonl", "--model", config_only]
    alone = sweet_rl.memory_needed(settings(*flags, "--simulator", "http://h/v1"), torch.bfloat16)["dialogues"]
    with_human = sweet_rl.memory_needed(settings(*flags, "--simulator", tmp_path), torch.bfloat16)["dialogues"]
    size = sweet_rl.parameters(sweet_rl.empty_model(str(tmp_path), sees=True))
    assert with_human[0] == alone[0] + 2 * size and size > 7e9


@pytest.mark.parametrize(
    "processes, gpu, flags, chosen",
    [
        (8, 80, [], "--micro-batch 2 --generate-batch 16"),
        (4, 30, ["--max-length", "1024"], "--lora 16 --micro-batch 2 --generate-batch 16"),
        (8, 34, ["--max-length", "1024"], "--shard"),
        (8, 17, ["--max-length", "1024"], "--lora 16 --shard --micro-batch 2 --generate-batch 16"),
    ],
    ids=str,
)
def test_what_fits_several_processes_is_chosen(config_only, monkeypatch, capsys, processes, gpu, flags, chosen):
    """Each trains a share; whole copies to sample and score with, else shares of those too; adapters where all weights are too many."""
    monkeypatch.setattr(sweet_rl, "memory_here", lambda device: gpu * 2**30)
    monkeypatch.setattr(sweet_rl, "RANKS", processes)
    monkeypatch.setattr(sweet_rl, "gathered", lambda value: [value])
    argv = ["--model", str(config_only), *flags]
    settings = sweet_rl.plan(parse_settings(argv), argv, CPU, torch.bfloat16)
    assert f"with {chosen}, chosen therefore" in capsys.readouterr().out
    assert settings.shard == ("--shard" in chosen) and (settings.lora == 16) == ("--lora" in chosen)


def test_the_plan_counts_shares(config_only, monkeypatch):
    """Of 8 processes: an eighth of everything, and what is whole while it is at work, the embeddings and two layers."""
    monkeypatch.setattr(sweet_rl, "RANKS", 8)
    size, layer, embeddings = 8_030_261_248, 218_112_000, 2 * 128256 * 4096 + 4096
    whole = embeddings + 2 * layer
    need = sweet_rl.memory_needed(settings("--model", config_only, "--shard"), torch.bfloat16)
    assert need["training"][:2] == [4 * size // 8 + 8 * whole, 12 * size // 8]
    assert need["candidates"][0] == 2 * (2 * size // 8) + 4 * whole


# ---------------------------------------------------------------------------------------------------------
# Bad input: one clear line, and nothing is made
BAD_FLAGS = {
    "stage": ["--stages", "collect,nonsense"],
    "no stage": ["--stages", ""],
    "method": ["--methods", "ppo"],
    "no task": ["--num-tasks", "0"],
    "negative": ["--candidates", "-1"],
    "rate": ["--critic-lr", "-0.1"],
    "a page's flag": ["--against", "eval_sweet.jsonl"],
    "another page's flag": ["--embedding", "pixels"],
    "no number": ["--critic-lr", "nan"],
    "no end": ["--actor-beta", "inf"],
    "device": ["--device", "nonsense"],
    "rank": ["--lora", "0"],
    "shares of one": ["--shard"],
    "plan": ["--plan"],
    "a head has no 1/L": ["--critic", "value", "--no-normalize"],
    "prompt": ["--agent-prompt", "nowhere.txt"],
    "human's prompt": ["--human-prompt", "nowhere.txt"],
    "model": ["--model", "./no/such/folder"],
    "hub model": ["--model", "someone/some-model"],
    "model without template": ["--model", "{bare}"],
    "trajectories": ["--model", "{base}", "--trajectories", "nowhere.jsonl"],
    "tasks": ["--model", "{base}", "--tasks", "nowhere.jsonl"],
    "tasks for trajectories": ["--model", "{base}", "--trajectories", "{tasks}"],
    "no hub": ["--model", "{base}"],
    "simulator": ["--model", "{base}", "--tasks", "{tasks}", "--simulator", "./no/such/folder"],
    "out is a file": ["--out", "{tasks}"],
    "no out": ["--out", ""],
    "more than all": ["--turn-fraction", "2"],
    "an empty prompt": ["--agent-prompt", "/dev/null"],
    "no address": ["--simulator", "http://"],
    "agent": ["--agent", "gpt-4o"],
    "a key in the address": ["--agent", "http://me:sk-1@host/v1", "--stages", "pairs"],
    "record": ["--out", "{torn}"],
}


@pytest.mark.parametrize("flags", BAD_FLAGS.values(), ids=BAD_FLAGS)
def test_bad_input_is_one_clear_line(finished, tmp_path, capsys, flags):
    base, bare, torn = finished["out"] / "base", tmp_path / "bare", tmp_path / "torn"
    shutil.copytree(base, bare, ignore=shutil.ignore_patterns("chat_template*"))
    torn.mkdir()
    (torn / "settings.json").write_text('{"base": {"ta')
    colbench.write_jsonl(tmp_path / "tasks.jsonl", [vars(task) for task in TASKS])
    places = {"base": base, "bare": bare, "torn": torn, "tasks": tmp_path / "tasks.jsonl"}
    argv = ["--device", "cpu", "--out", str(tmp_path / "out"), *(flag.format(**places) for flag in flags)]
    capsys.readouterr()
    assert main(argv) != 0
    error = capsys.readouterr().err.strip().split("\n")[-1]
    assert error.startswith("error: ") and len(error) < 600
    made = {path.name for path in (tmp_path / "out").iterdir()} if (tmp_path / "out").exists() else set()
    assert made <= {".lock", "settings.json"}


@pytest.mark.parametrize("flags", [["--nonsense"], ["--candidates", "many"], ["--task", "other"], ["--precision", "int8"]], ids=str)
def test_what_the_parser_refuses(flags, capsys):
    with pytest.raises(SystemExit) as ended:
        main(flags)
    assert ended.value.code == 2 and "error: " in capsys.readouterr().err
