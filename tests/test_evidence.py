"""What tests/evidence.py computes itself: intervals, what two runs have in common, states made by hand."""

import json
import random

import colbench
import evidence
import pytest
import sweet_rl
from simulator import ScriptedSimulator


def test_an_interval_over_seeds_is_students():
    mean, half = evidence.interval([0.1, 0.2, 0.3])
    assert mean == pytest.approx(20) and half == pytest.approx(4.30 * 10 / 3**0.5)
    assert evidence.mean_interval([0.25, 0.25]) == "25.0 ± 0.0"


def test_a_run_shares_what_other_settings_do_not_change(tmp_path):
    donor = sweet_rl.Run(sweet_rl.parse_settings(["--out", str(tmp_path / "donor"), "--seed", "7"]))
    donor.records |= {name: donor.shape(name) for name in ("base", "trajectories.jsonl", "critic")}
    for name in ("base", "critic"):
        donor.path(name).mkdir()
        (donor.path(name) / "weights").write_text("w")
    donor.path("trajectories.jsonl").touch()
    donor.write_json("settings.json", donor.records)
    into = sweet_rl.Run(sweet_rl.parse_settings(["--out", str(tmp_path / "into"), "--seed", "7", "--no-hint"]))
    evidence.share(tmp_path / "donor", into)
    assert {path.name for path in into.out.iterdir()} - {".lock"} == {"base", "trajectories.jsonl", "settings.json"}
    assert (into.path("base") / "weights").read_text() == "w"
    assert json.loads(into.path("settings.json").read_text()) == {n: donor.records[n] for n in ("base", "trajectories.jsonl")}


def test_held_out_tasks_are_replaced_and_training_tasks_are_not(tmp_path):
    sweet = sweet_rl.Sweet(sweet_rl.parse_settings(["--out", str(tmp_path), "--seed", "3"]))
    with evidence.held_out("validation", 5):
        assert sweet.tasks("test") == colbench.miniature_tasks("validation", 5, 3)
        assert sweet.tasks("train") == colbench.miniature_tasks("train", 300, 3)
    assert sweet.tasks("test") == colbench.miniature_tasks("test", 500, 3)


def test_hand_made_states_are_what_their_names_say():
    tasks = colbench.miniature_tasks("validation", 40)
    states = evidence.hand_made_states(tasks, random.Random(0))
    counts = {kind: len(found) for kind, found in states.items()}
    assert 0 < counts.pop("wanted over repeated question") < 40 and set(counts.values()) == {40}
    for kind, found in states.items():
        for task, history, right, wrong in found:
            all_told, details = history[-1]["content"].endswith(colbench.ENOUGH), colbench.miniature_details(task.ground_truth)
            reply = [ScriptedSimulator().reply_one(task, [*history, evidence.message(text)]) for text in (right, wrong)]
            assert all_told == (kind in ("answer over needless question", "right over miscopied answer"))
            assert (reply[0] != colbench.UNKNOWN) == kind.startswith("wanted") or all_told
            if "answer" not in kind or "needless" in kind:
                assert reply[1] == colbench.UNKNOWN
            else:
                assert colbench.ANSWER_MARKER in wrong and colbench.miniature_details(wrong) != details
            if all_told:
                assert right.endswith(task.ground_truth)
