"""Nothing lost: a run that is killed and started again makes the files of an undisturbed one, byte for byte.

tests/kill.py shows the same for the whole program, at random moments; here, each moment between two files.
"""

import os
import shutil

import pytest
import torch

import colbench
import sweet_rl
from colbench import InputError
from sweet_rl import Checkpoint, Example, Run, dpo_objective, parse_settings, save_model

HISTORY = [{"role": "system", "content": "ask, then answer."}, {"role": "user", "content": "write fee(x) for a parcel."}]


@pytest.fixture(autouse=True)
def always_due(monkeypatch):
    """A checkpoint behind every step."""
    monkeypatch.setattr(Checkpoint, "due", property(lambda self: 0, lambda self, due: None), raising=False)


def settings(out):
    return parse_settings(["--out", str(out), "--device", "cpu"])


@pytest.fixture
def training(tokenizer, tmp_path):
    """`training(checkpoint, stop)`: (model, metrics) of six steps with dropout, None where step `stop` was the end."""
    encoder = sweet_rl.Encoder(tokenizer, [tokenizer.eos_token_id])
    actions = [{"role": "assistant", "content": text} for text in ("what is the rate?", "hello", "", "no")]
    examples = [Example(encoder.candidates(HISTORY, actions[:n])) for n in (2, 4, 2)]

    def train(checkpoint=None, stop=7):
        steps = iter(range(1, stop))

        def objective(*given):
            next(steps)
            return dpo_objective(1.0, 0.01)(*given)

        torch.manual_seed(0)
        model = sweet_rl.tiny_model(tokenizer)
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.5
        torch.seed()  # what was drawn before is nothing to a training run
        trainer = sweet_rl.Trainer(settings(tmp_path), torch.device("cpu"), torch.float32)
        try:
            return model, trainer.train(model, examples, objective, "rft", 1e-2, 2, 1, checkpoint)
        except StopIteration:
            return None

    return train


@pytest.mark.parametrize("stop", [1, 2, 4, 6])
def test_training_goes_on_from_its_checkpoint(training, tmp_path, capsys, stop):
    path = tmp_path / "rft.checkpoint"
    model, history = training()
    assert training(Checkpoint(path, "shape"), stop) is None
    found, metrics = training(Checkpoint(path, "shape"), 7 - stop + 1)  # no step more than is missing
    assert metrics == history and [row["step"] for row in history] == list(range(1, 7))
    assert all(map(torch.equal, model.parameters(), found.parameters()))
    assert (f"goes on behind step {stop - 1} of 6" in capsys.readouterr().out) == (stop > 1)


def test_a_checkpoint_of_other_settings_is_not_used_and_a_damaged_one_is_one_line(training, tmp_path, capsys):
    path = tmp_path / "rft.checkpoint"
    training(Checkpoint(path, "other"), 3)
    training(Checkpoint(path, "shape"))
    assert "goes on" not in capsys.readouterr().out
    for content in (path.read_bytes()[:1000], b"", b"\x80\x04cposix\nsystem\n"):  # the last is a pickle's beginning
        path.write_bytes(content)
        with pytest.raises(InputError, match="rft.checkpoint: expected a checkpoint .*delete it") as caught:
            training(Checkpoint(path, "shape"))
        assert "\n" not in str(caught.value)


def make_all(out, training, tokenizer):
    """The three ways in which a product comes to be: a file at once, a file by batches, a model."""
    run = Run(settings(out))
    rows = lambda batch: [{"item": i, "dice": torch.rand(1).item()} for i in batch]  # noqa: E731

    def rft(path):
        model, history = training(run.checkpoint("rft"))
        run.log(history)
        save_model(model, tokenizer, path)

    run.make("trajectories.jsonl", lambda path: run.rows_by_batch(path, list(range(5)), 2, rows))
    run.make("trajectory_pairs.jsonl", lambda path: colbench.write_jsonl(path, [{"pair": 1}]))
    run.make("rft", rft)


def in_a_process(work, *given) -> int:
    """Fork, work, and return the exit status."""
    child = os.fork()
    if child == 0:
        try:
            work(*given)
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_kill_at_any_file_loses_nothing(training, tokenizer, tmp_path):
    """Dead before and behind each renaming, in a process of its own so that nothing is tidied up; then once more."""
    moment = iter(())

    def dying(aside, path):
        if next(moment, None) == 0:
            os._exit(9)
        replace(aside, path)
        if next(moment, None) == 0:
            os._exit(9)

    def run(out, last):
        nonlocal moment
        moment = iter(range(last, -1, -1))
        sweet_rl.os.replace = dying
        make_all(out, training, tokenizer)

    def content(out):
        return {str(f.relative_to(out)): f.read_bytes() for f in out.rglob("*") if f.is_file()}

    replace, whole = os.replace, tmp_path / "whole"
    (whole / "base").mkdir(parents=True)
    make_all(whole, training, tokenizer)
    assert {path.name for path in whole.iterdir()} == {
        ".lock", "base", "metrics.jsonl", "settings.json", "trajectories.jsonl", "trajectory_pairs.jsonl", "rft"
    }  # fmt: skip
    for last in range(100):
        out = tmp_path / str(last)
        (out / "base").mkdir(parents=True)
        status = in_a_process(run, out, last)
        make_all(out, training, tokenizer)
        assert content(out) == content(whole), last
        shutil.rmtree(out)
        if status == 0:
            break
        assert status == 9
    assert 20 < last < 60
