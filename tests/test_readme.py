"""The README's commands: each is parsed, and those that need no hub, server or keyboard are run at smoke size."""

import re
import shlex
from pathlib import Path

import pytest

import sweet_rl
from colbench import load_tasks

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
COMMANDS = [line for block in BLOCKS for line in block.splitlines() if line.startswith(("python sweet_rl.py", "torchrun "))]


def test_the_two_commands_of_the_first_minute_are_there():
    assert "pip install -r requirements.txt" in BLOCKS[0] and "python sweet_rl.py" in COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_parses(command):
    settings = sweet_rl.parse_settings(shlex.split(command.partition("sweet_rl.py")[2]))
    assert settings.is_tiny == ("--model" not in command)


def test_the_hub_is_asked_only_without_own_tasks():
    plain = sweet_rl.parse_settings(["--model", "owner/name"])
    assert plain.trajectories == plain.tasks == "facebook/collaborative_agent_bench"
    assert sweet_rl.parse_settings(["--model", "owner/name", "--tasks", "t.jsonl"]).trajectories is None


def test_every_function_named_in_the_readme_exists():
    for owner, name in re.findall(r"`(colbench|Sweet|Encoder)\.(?!py)(\w+)", README):
        assert hasattr({"colbench": sweet_rl.colbench}.get(owner) or getattr(sweet_rl, owner), name), name
    for name in ("turn_advantages", "bradley_terry_loss", "dpo_loss", "pack", "log_probs"):
        assert f"`{name}`" in README and hasattr(sweet_rl, name)


def test_the_task_of_the_readme_loads_and_is_valid(tmp_path):
    row = re.search(r"```json\n(.*?)```", README, re.DOTALL)[1]
    (tmp_path / "tasks.jsonl").write_text(row)
    (task,) = load_tasks(str(tmp_path / "tasks.jsonl"))
    assert sweet_rl.colbench.unit_test_rewards([task], [task.ground_truth]) == [1.0]


@pytest.mark.parametrize("flag", ["--tasks", "--train-tasks", "--trajectories"])
def test_a_missing_file_is_noticed_before_anything_is_trained(flag, tmp_path, capsys):
    assert sweet_rl.main([flag, str(tmp_path / "nope.jsonl"), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "nope.jsonl" in error and error.count("\n") == 1
    assert not (tmp_path / "out" / "base").exists()


@pytest.mark.parametrize("flags", [["--simulator"], ["--agent"], ["--agent-model", "named", "--agent"]], ids=str)
def test_a_dead_server_is_noticed_before_anything_is_trained(tmp_path, capsys, monkeypatch, flags):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    assert sweet_rl.main([*flags, "http://127.0.0.1:9/v1", "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "http://127.0.0.1:9/v1" in error and error.count("\n") == 1
    assert not (tmp_path / "out" / "base").exists()
