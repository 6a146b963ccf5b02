"""What one prefix with many branches saves: ours against the plain way, side by side.  No test: figures.

    python tests/bench_packing.py FOLDER    SmolLM2-135M-Instruct, as tests/smollm2.py fetches it

Each variant runs in a process of its own, so that its peak memory is its own; pairs of variants must agree.
"""

import json
import random
import resource
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch

from simulator import ChatModel, plain_settings
from sweet_rl import Branch, Example, Trainer, dpo_objective, load_model, takes_trees, turn_advantages

HISTORY, LONG_HISTORY, ACTION, SAMPLES = 600, 2000, 50, 16
CASES = {"train": 8, "score": SAMPLES, f"sample {HISTORY}": SAMPLES, f"sample {LONG_HISTORY}": SAMPLES}  # branches


def branches(count: int, vocabulary: int) -> list[Branch]:
    """Candidates of 45 to 55 tokens for one turn after a history of 600."""
    rng = random.Random(0)
    ids = lambda length: [rng.randrange(100, vocabulary) for _ in range(length)]  # noqa: E731
    history = ids(HISTORY)
    return [Branch([history], [ids(ACTION + rng.randint(-5, 5))]) for _ in range(count)]


def plain_log_probs(model, rows: list[Branch]) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probs, turn_ids), (R, T) each, right-aligned: a padded row each, logits only where an action can be."""
    whole = [row.prompts[0] + row.actions[0] for row in rows]
    width, longest = max(map(len, whole)), max(len(row.actions[0]) for row in rows)
    ids = torch.tensor([[0] * (width - len(row)) + row for row in whole])  # (R, W)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in whole])  # (R, W)
    logits = model(
        ids,
        attention_mask=mask,
        position_ids=(mask.cumsum(1) - 1).clamp(min=0),
        use_cache=False,
        logits_to_keep=longest + 1,
    ).logits[:, :-1]  # (R, T, V)
    logps = logits.gather(2, ids[:, -longest:, None])[:, :, 0] - logits.logsumexp(2)  # (R, T)
    lengths = torch.tensor([len(row.actions[0]) for row in rows])[:, None]
    turn_ids = -(torch.arange(longest)[None] < longest - lengths).long()  # (R, T) -1 is padding, 0 the turn
    return logps * (turn_ids == 0), turn_ids


def train(model, packed: bool, count: int) -> list[float]:
    """Reference log-probs, forward and backward of a DPO step on 4 pairs of one turn: the loss, then each gradient's norm."""
    trainer, rows = Trainer(SimpleNamespace(micro_batch=count), torch.device("cpu"), torch.float32), branches(count, 40000)
    objective = dpo_objective(beta=0.1, nll_weight=0.1)
    model.train()
    if packed:
        example = Example(rows)
        trainer.add_reference(model, [example], "bench")
        loss = trainer.accumulate(model, [example], objective)["loss"]
    else:
        with torch.no_grad():
            reference, _ = plain_log_probs(model, rows)
        logps, turn_ids = plain_log_probs(model, rows)
        mean = objective(logps, reference, turn_ids)[0].mean()
        mean.backward()
        loss = mean.item()
    return [loss, *(weight.grad.norm().item() for weight in model.parameters())]


@torch.no_grad()
def score(model, packed: bool, count: int) -> list[float]:
    """Critic and reference on 16 candidates.  Sums of log-probs, since equal models have advantages of zero."""
    trainer, rows = Trainer(SimpleNamespace(micro_batch=count), torch.device("cpu"), torch.float32), branches(count, 40000)
    read = (lambda: trainer.log_probs(model, [Example(rows)])) if packed else (lambda: plain_log_probs(model, rows))
    (logps, turn_ids), (reference, _) = read(), read()
    turn_advantages(logps, reference, turn_ids)
    return logps.sum(1).tolist()


@torch.no_grad()
def sample(model, tokenizer, packed: bool, count: int, history: int) -> list[str]:
    """16 samples of 50 tokens; without an end token, so that both ways decode equally many."""
    chat = ChatModel(model, tokenizer, max_new_tokens=ACTION, batch_size=count)
    chat.ends = [model.config.vocab_size]  # no sampled id
    ids = tokenizer("The price depends on the day of the week. ", add_special_tokens=False)["input_ids"]
    prompt = tokenizer.decode((ids * history)[:history])
    torch.manual_seed(0)
    if packed:
        return [action.text for action in chat.generate([prompt], count)[0]]
    rows = torch.tensor([tokenizer(prompt, add_special_tokens=False)["input_ids"]])  # (1, W)
    config = chat.generation_config(chat.ends[0])
    config.num_return_sequences = count
    with plain_settings(model):
        out = model.generate(rows, attention_mask=torch.ones_like(rows), generation_config=config)
    return tokenizer.batch_decode(out[:, rows.shape[1] :], skip_special_tokens=True)


def turn(model, tokenizer, tokens: int) -> list:
    """The next message of 8 dialogues with a history of 600 tokens each, cut after so many."""
    chat = ChatModel(model, tokenizer, max_new_tokens=tokens)
    chat.ends = [model.config.vocab_size]  # no sampled id
    chat.generate([" day" * HISTORY] * chat.batch_size, 1)
    return []


def measure(folder: str, case: str, packed: bool) -> dict:
    """One variant, in this process: seconds, peak memory in GB (of the process, model included), and its result."""
    model, tokenizer = load_model(folder, "cpu")
    model.takes_trees = takes_trees(model)  # asked once a run; the first call sets up what later ones find ready
    kind, _, size = case.partition(" ")
    start = time.perf_counter()
    if kind == "sample":
        result = sample(model, tokenizer, packed, CASES[case], int(size))
    elif kind == "turn":
        result = turn(model, tokenizer, int(size))
    else:
        result = {"train": train, "score": score}[kind](model, packed, CASES[case])
    seconds = time.perf_counter() - start
    unit = 2**30 if sys.platform == "darwin" else 2**20  # ru_maxrss is in bytes there, in kB elsewhere
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
    return {"seconds": seconds, "GB": peak, "result": result}


def run(folder: str, case: str, which: str) -> dict:
    return json.loads(subprocess.check_output([sys.executable, __file__, folder, case, which]).splitlines()[-1])


def main(folder: str) -> None:
    print(f"{torch.get_num_threads()} threads\n{'':12} {'ours s':>8} {'plain s':>8} {'faster':>7} {'ours GB':>8} {'plain GB':>8}")
    for case in CASES:
        ours, plain = (run(folder, case, which) for which in ("ours", "plain"))
        if case.startswith("sample"):
            same = sum(a == b for a, b in zip(ours["result"], plain["result"], strict=True))
            agree = f"{same} of {SAMPLES} samples equal"
        else:
            error = max(abs(a - b) / max(1, abs(b)) for a, b in zip(ours["result"], plain["result"], strict=True))
            assert error < 1e-4, f"{case}: ours and plain differ by {error:.1e}"
            agree = f"largest difference {error:.0e}"
        figures = ours["seconds"], plain["seconds"], plain["seconds"] / ours["seconds"], ours["GB"], plain["GB"]
        print(f"{case:12} {{:8.1f}} {{:8.1f}} {{:6.1f}}x {{:8.2f}} {{:8.2f}}   {agree}".format(*figures), flush=True)
    turn, reading = (run(folder, f"turn {tokens}", "ours")["seconds"] for tokens in (ACTION, 1))
    print(f"the next turn of 8 dialogues: {turn:.1f} s, of which {reading:.1f} s to read their histories again")


if __name__ == "__main__":
    if len(sys.argv) == 4:
        print(json.dumps(measure(sys.argv[1], sys.argv[2], sys.argv[3] == "ours")))
    elif len(sys.argv) == 2:
        main(sys.argv[1])
    else:
        sys.exit("usage: python tests/bench_packing.py FOLDER")
