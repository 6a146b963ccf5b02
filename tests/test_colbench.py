"""Tasks, files, protocol, rollout, figures and the miniature.  The sandboxed reward has test_reward.py."""

import json
import math
import re

import pytest

import colbench
from colbench import (
    ANSWER_MARKER,
    GOODBYE,
    Action,
    Failure,
    InputError,
    Task,
    Trajectory,
    fill,
    load_tasks,
    load_trajectories,
    miniature_code,
    miniature_details,
    miniature_tasks,
    parse_action,
    read_jsonl,
    rollout,
    save_trajectories,
    trajectory_row,
    unit_test_rewards,
    wilson_interval,
)
from simulator import ScriptedDesigner, ScriptedSimulator

TASK_ROW = {"problem_description": "write f", "ground_truth": "def f(x):\n    return x", "test_cases": {"test1": "f(1)"}}
TASK = Task(**TASK_ROW)
ANSWER_TURN = {
    "role": "assistant",
    "content": f"{ANSWER_MARKER}\ndef f(x): return x",
    "input": "<s>write f",
    "output": f"easy. OUTPUT: {ANSWER_MARKER}\ndef f(x): return x",
}
ROW = {
    "task": TASK_ROW,
    "dialogue_history": [{"role": "user", "content": "write f"}, ANSWER_TURN],
    "answer": "def f(x): return x",
}


def write_lines(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def without(row: dict, name: str) -> dict:
    return {key: value for key, value in row.items() if key != name}


# ---------------------------------------------------------------------------------------------------------
# Files
@pytest.mark.parametrize("extra", [{}, {"reward": 0.0}, {"reward": 1}, {"reward": 0.3}], ids=str)
def test_a_trajectory_row_survives_both_ways(tmp_path, extra):
    cut = {"role": "assistant", "content": "what?", "input": "p", "output": "hm OUTPUT: what?", "truncated": True}
    rows = [ROW | extra, ROW | extra | {"dialogue_history": [{"role": "user", "content": "é \u2028 {x}"}, cut]}]
    loaded = load_trajectories(write_lines(tmp_path / "in.jsonl", *rows))
    assert [t.reward for t in loaded] == [extra.get("reward")] * 2
    assert [trajectory_row(t) for t in loaded] == rows
    save_trajectories(tmp_path / "out.jsonl", loaded)
    assert [json.loads(line) for line in (tmp_path / "out.jsonl").read_text("utf-8").split("\n")[:-1]] == rows
    assert load_trajectories(tmp_path / "out.jsonl") == loaded


def test_a_reward_of_null_counts_as_absent(tmp_path):
    loaded = load_trajectories(write_lines(tmp_path / "f.jsonl", ROW | {"reward": None}))[0]
    assert loaded.reward is None and trajectory_row(loaded) == ROW


def test_half_a_character_from_a_server_can_be_saved(tmp_path):
    """A server that cuts its reply inside an emoji sends half of a surrogate pair, as JSON allows."""
    dialogue = [{"role": "user", "content": json.loads('"\\ud83d"')}, ANSWER_TURN]
    save_trajectories(tmp_path / "f.jsonl", [Trajectory(TASK, dialogue, "")])
    assert len(load_trajectories(tmp_path / "f.jsonl")) == 1


def test_task_rows_keep_their_order(tmp_path):
    rows = [TASK_ROW | {"problem_description": f"task {i}"} for i in range(3)]
    tasks = load_tasks(write_lines(tmp_path / "f.jsonl", *rows))
    assert [vars(task) for task in tasks] == rows


def test_byte_order_mark_crlf_and_blank_lines_are_fine(tmp_path):
    lines = [json.dumps(TASK_ROW), "", json.dumps(TASK_ROW | {"problem_description": "é"}, ensure_ascii=False), ""]
    (tmp_path / "f.jsonl").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    assert [task.problem_description for task in load_tasks(str(tmp_path / "f.jsonl"))] == ["write f", "é"]


GOOD = json.dumps(TASK_ROW)
TURN = {"role": "user", "content": "hi"}
BAD_FILES = {  # name: (loader, bytes of the file, words that the one line must have besides the file's name)
    "missing field": (load_tasks, f"{GOOD}\n{json.dumps(without(TASK_ROW, 'test_cases'))}", ["line 2", "'test_cases'"]),
    "wrong type": (load_tasks, json.dumps(TASK_ROW | {"ground_truth": 3}), ["line 1", "'ground_truth'", "a text", "a number"]),
    "a call that is no text": (load_tasks, json.dumps(TASK_ROW | {"test_cases": {"test1": 3}}), ["line 1", "test_cases"]),
    "tasks for trajectories": (load_trajectories, f"{GOOD}\n{GOOD}", ["line 1", "'task'"]),
    "task inside": (load_trajectories, json.dumps(ROW | {"task": without(TASK_ROW, "ground_truth")}), ["1", "'ground_truth'"]),
    "turn without content": (load_trajectories, json.dumps(ROW | {"dialogue_history": [TURN, {"role": "user"}]}), ["1", "'content'"]),
    "turn that is a text": (load_trajectories, json.dumps(ROW | {"dialogue_history": ["hi"]}), ["1", "an object", "a text"]),
    "reward as text": (load_trajectories, json.dumps(ROW | {"reward": "1"}), ["1", "'reward'"]),
    "not JSON": (load_tasks, f"{GOOD}\nhello", ["line 2", "JSON"]),
    "cut": (load_tasks, f"{GOOD}\n{GOOD[:40]}", ["line 2", "JSON"]),
    "a list": (load_tasks, "[1]", ["line 1", "object", "list"]),
    "JSON over many lines": (load_tasks, json.dumps(TASK_ROW, indent=1), ["line 1", "JSON"]),
    "deeper than python goes": (load_tasks, "[" * 200_000, ["line 1", "JSON"]),
    "not UTF-8": (load_tasks, f"{GOOD}\n".encode() + b"\xff\xfe{", ["line 2", "UTF-8"]),
    "UTF-16": (load_tasks, GOOD.encode("utf-16"), ["line 1", "UTF-8"]),
    "a role of its own": (load_trajectories, json.dumps(ROW | {"dialogue_history": [TURN | {"role": "human"}]}), ["item 1", "user"]),
    "no number": (load_trajectories, json.dumps(ROW | {"reward": math.nan}), ["'reward'", "finite", "nan"]),
    "a number beyond all": (load_trajectories, json.dumps(ROW | {"reward": 10**400}), ["'reward'", "finite"]),
    "pictures": (load_trajectories, b"\x89PNG\r\n\x1a\n\0\0", ["line 1", "UTF-8"]),
    "zeros": (load_tasks, b"\0\0\0", ["line 1", "JSON"]),
    "empty": (load_tasks, "", ["none"]),
    "blank lines": (load_trajectories, "\n \n", ["none"]),
}


@pytest.mark.parametrize("load, content, words", BAD_FILES.values(), ids=BAD_FILES)
def test_a_malformed_file_is_one_clear_line(tmp_path, load, content, words):
    path = tmp_path / "some.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError) as caught:
        load(str(path))
    message = str(caught.value)
    assert "\n" not in message and len(message) < 400
    assert message.startswith(str(path))
    assert [word for word in words if word not in message.replace(str(path), "")] == []


def test_a_bad_row_is_named_by_its_line_in_the_file(tmp_path):
    """Blank lines count: an editor has to find it."""
    path = tmp_path / "some.jsonl"
    path.write_text(f"{json.dumps(ROW)}\n\n{json.dumps(ROW | {'reward': 'x'})}\n")
    with pytest.raises(InputError, match="line 3, 'reward'"):
        load_trajectories(str(path))


@pytest.mark.parametrize("source", ["nowhere.jsonl", "no/such.jsonl", "a/b/c", "nothing here"])
def test_a_missing_file_is_one_clear_line(source):
    with pytest.raises(InputError, match="no such file"):
        load_tasks(source)


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        load_tasks(str(tmp_path))


def test_no_hub_is_one_clear_line():
    with pytest.raises(InputError, match="hub") as caught:
        load_tasks("someone/some-dataset")
    assert "\n" not in str(caught.value)


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "f.jsonl"
    colbench.write_jsonl(path, [{"a": 1}])
    with pytest.raises(TypeError):
        colbench.write_jsonl(path, [{"a": 2}, {"a": object()}])
    assert read_jsonl(path, {"a": int}) == [{"a": 1}]
    assert [file.name for file in tmp_path.iterdir()] == ["f.jsonl"]  # and nothing else


# ---------------------------------------------------------------------------------------------------------
# Protocol
CODE = "def f(x):\n    return x"
FENCED = f"```python\n{CODE}\n```"
PRINTS = f"def f(x):\n    print('I WANT TO ANSWER:', \"OUTPUT:\")\n    return x"
DOCUMENTED = f'def f(x):\n    """Prints I WANT TO ANSWER: x, then OUTPUT: x."""\n    return x'
A = "I WANT TO ANSWER:"
ACTIONS = {  # name: (raw message, what the human sees, the answer)
    "question": ("what is x?", "what is x?", None),
    "spaces around": ("\n what is x? \n", "what is x?", None),
    "nothing": ("", "", None),
    "thought": ("hm, maybe x. OUTPUT: what is x?", "what is x?", None),
    "answer": (f"{A}\n{CODE}", f"{A}\n{CODE}", CODE),
    "answer on the line": (f"{A} {CODE}", f"{A} {CODE}", CODE),
    "words before": (f"ok. {A}\n{CODE}", f"ok. {A}\n{CODE}", CODE),
    "marker behind OUTPUT": (f"a thought OUTPUT: {A}\n{CODE}", f"{A}\n{CODE}", CODE),
    "marker before OUTPUT": (f"{A}\nOUTPUT:\n{CODE}", f"{A}\nOUTPUT:\n{CODE}", CODE),
    "empty answer": (f"{A}", A, ""),
    "code that prints markers": (f"{A}\n{PRINTS}", f"{A}\n{PRINTS}", PRINTS),
    "code that documents markers": (f"{A}\n{DOCUMENTED}", f"{A}\n{DOCUMENTED}", DOCUMENTED),
    "a thought and such code": (f"hm OUTPUT: {A}\n{PRINTS}", f"{A}\n{PRINTS}", PRINTS),
    "such code behind both": (f"{A} OUTPUT:\n{DOCUMENTED}", f"{A} OUTPUT:\n{DOCUMENTED}", DOCUMENTED),
    "the marker twice": (f"{A}\n{CODE}\n# {A}\ny = 1", f"{A}\n{CODE}\n# {A}\ny = 1", f"{CODE}\n# {A}\ny = 1"),
    "a quoted marker asks nothing": ("may it print 'I WANT TO ANSWER:'?", "may it print 'I WANT TO ANSWER:'?", None),
    "indented code": (f"{A}\n{CODE}\n\n\n    y", f"{A}\n{CODE}\n\n\n    y", f"{CODE}\n\n\n    y"),
}


@pytest.mark.parametrize("text, seen, answer", ACTIONS.values(), ids=ACTIONS)
def test_parse_action(text, seen, answer):
    assert parse_action(text) == (seen, answer)


FENCES = {
    "fenced answer": f"{A}\n{FENCED}",
    "fence on the marker's line": f"{A} {FENCED}",
    "all in a fence": f"```\n{A}\n{CODE}\n```",
    "all in a fence, thought first": f"thinking\nOUTPUT:\n```python\n{A}\n{CODE}\n```",
    "words around": f"{A}\nHere it is:\n{FENCED}\nIt returns x.",
}


@pytest.mark.parametrize("text", FENCES.values(), ids=FENCES)
def test_fences_do_not_cost_the_reward(text):
    _, answer = parse_action(text)
    assert unit_test_rewards([TASK], [answer]) == [1.0]


@pytest.mark.parametrize(
    "template, filled",
    [
        ("{a}-{b}", "{b} {c} \\1 {{a}}-B"),  # what is filled in is not filled again
        ("{c} {} {{x}} {0} {a!r} {b}", "{c} {} {{x}} {0} {a!r} B"),  # other braces are text
        ("nothing", "nothing"),
    ],
)
def test_fill(template, filled):
    assert fill(template, a="{b} {c} \\1 {{a}}", b="B") == filled


# ---------------------------------------------------------------------------------------------------------
# Rollout
def says(*texts):
    """An agent that says the n-th text in its n-th turn, and keeps the histories that it got."""

    def agent(histories):
        agent.seen.append(histories)
        turns = [sum(m["role"] == "assistant" for m in history) for history in histories]
        return [Action(texts[min(turn, len(texts) - 1)], f"prompt {turn}") for turn in turns]

    agent.seen = []
    return agent


def replies(*texts):
    """A human that gives the n-th text as its n-th reply."""
    return lambda tasks, dialogues: [texts[min(len(d) // 2 - 1, len(texts) - 1)] for d in dialogues]


def test_ten_turns_at_most_and_the_last_message_is_the_answer():
    agent = says(*[f"question {i}" for i in range(1, 10)], "thought OUTPUT: def f(x): pass", "never said")
    played = rollout(agent, replies("yes"), [TASK])[0]
    assert len(played.turns) == len(agent.seen) == 10
    assert [m["role"] for m in played.dialogue] == ["user", "assistant"] * 10  # no reply to the last one
    assert played.answer == "def f(x): pass" and played.reward is None


def test_the_marker_ends_a_dialogue():
    agent = says("what?", f"hm OUTPUT: {A}\n{CODE}", "never said")
    played = rollout(agent, replies("x"), [TASK])[0]
    assert played.answer == CODE and len(played.dialogue) == 4
    last = {"role": "assistant", "content": f"{A}\n{CODE}", "input": "prompt 1", "output": f"hm OUTPUT: {A}\n{CODE}"}
    assert played.dialogue[-1] == last


def test_a_cut_message_is_marked():
    played = rollout(lambda histories: [Action("wha", "p", truncated=True)], replies("x"), [TASK], 1)[0]
    assert played.dialogue[1] == {"role": "assistant", "content": "wha", "input": "p", "output": "wha", "truncated": True}


def test_a_human_who_leaves_gets_no_answer():
    played = rollout(says("what?", "what else?"), replies("x", GOODBYE), [TASK])[0]
    assert played.answer == "" and played.dialogue[-1] == {"role": "user", "content": GOODBYE} and len(played.turns) == 2


def test_replies_are_cut():
    agent = says("what?")
    played = rollout(agent, replies("y" * 1000), [TASK], 2)[0]
    assert played.dialogue[2]["content"] == "y" * 400


def test_a_chooser_knows_the_tasks_and_the_agent_only_what_was_said():
    """Each turn's candidates come from histories; of the dialogues still open, `choose` gets task, history, candidates."""
    tasks, seen, asked = [Task("a", "c of a"), Task("b", "c of b")], [], []

    def agent(histories):
        seen.append(histories)
        return [[Action("what?"), Action(f"{ANSWER_MARKER} {history[0]['content']}")] for history in histories]

    def choose(tasks, histories, candidates):
        asked.append([t.ground_truth for t in tasks])
        ready = [task.problem_description == "a" or len(history) > 1 for task, history in zip(tasks, histories)]
        return [actions[answers] for actions, answers in zip(candidates, ready)]

    played = rollout(agent, replies("x", "x"), tasks, choose=choose)
    assert [t.answer for t in played] == ["a", "b"] and [len(t.turns) for t in played] == [1, 2]
    assert asked == [["c of a", "c of b"], ["c of b"]] and "c of" not in str(seen)


def test_lockstep_asks_only_about_open_dialogues():
    """Task i answers at its turn i; the batches shrink by one each time, and dialogues do not mix."""
    tasks = [Task(f"task {i}", "", {}) for i in range(1, 4)]

    def agent(histories):
        batches.append(len(histories))
        return [Action(f"{A} {h[0]['content']}" if h[0]["content"] == f"task {len(batches)}" else "?") for h in histories]

    def human(tasks, dialogues):
        assert all(d[0]["content"] == t.problem_description and d[-1]["role"] == "assistant" for t, d in zip(tasks, dialogues))
        return [f"reply on {task.problem_description}" for task in tasks]

    batches = []
    played = rollout(agent, human, tasks)
    assert batches == [3, 2, 1]
    assert [t.answer for t in played] == ["task 1", "task 2", "task 3"]
    assert {m["content"] for m in played[2].dialogue if m["role"] == "user"} == {"task 3", "reply on task 3"}


def test_an_agent_or_a_human_that_loses_a_dialogue_is_an_error():
    with pytest.raises(ValueError):
        rollout(lambda histories: [Action("?")], replies("x"), [TASK, TASK])
    with pytest.raises(ValueError):
        rollout(says("?"), lambda tasks, dialogues: ["x"], [TASK, TASK])


def test_a_dialogue_that_fails_ends_no_other():
    """The agent's server fails the first dialogue at once, the human's the second behind its first turn."""
    agent = lambda histories: [Action(Failure("no agent")) if h[0]["content"] == "t0" else Action("what?") for h in histories]
    human = lambda tasks, dialogues: [Failure("no human") if t.problem_description == "t1" else "x" for t in tasks]
    played = rollout(agent, human, [Task(f"t{i}", "c", {}) for i in range(3)], max_turns=3)
    assert [(len(t.turns), t.failed, t.answer) for t in played] == [(0, "no agent", ""), (1, "no human", ""), (3, None, "what?")]
    assert [trajectory_row(t).get("failed") for t in played] == ["no agent", "no human", None]


def test_the_agent_gets_what_was_seen_and_never_the_solution():
    task = Task("write f", "SENTINEL", {"test1": "f('SENTINEL')"})
    agent = says("SECRET thought OUTPUT: what?", "SECRET again OUTPUT: and then?", f"{A} x")
    played = rollout(agent, replies("this"), [task])[0]
    given = json.dumps(agent.seen)
    assert "SENTINEL" not in given and "SECRET" not in given and given.count("and then?") == 1
    assert all(set(m) == {"role", "content"} for batch in agent.seen for history in batch for m in history)
    assert [turn.history for turn in played.turns] == [batch[0] for batch in agent.seen]
    assert [turn.action["output"][:6] for turn in played.turns] == ["SECRET", "SECRET", A[:6]]


# ---------------------------------------------------------------------------------------------------------
# Figures
@pytest.mark.parametrize(
    "values, low, high",
    [
        ([0.0] * 10, 0.0, 0.2775),  # (z²/2n)(1 + 1) / (1 + z²/n) = 0.38416 / 1.38416
        ([1.0] * 10, 0.7225, 1.0),
        ([1.0, 0.0] * 5, 0.2366, 0.7634),  # 0.5 -+ 1.96 sqrt(0.025 + 0.0096040) / 1.38416
        ([1.0] * 40 + [0.0] * 60, 0.3094, 0.4980),
        ([0.5] * 10, 0.2366, 0.7634),  # the mean is what counts
    ],
)
def test_wilson_interval(values, low, high):
    assert wilson_interval(values) == pytest.approx((low, high), abs=1e-4)


def test_figures():
    figures = colbench.backend_figures([1.0, 0.9, 0.0, 0.5])
    assert figures["success"] == 0.25 and figures["tests_passed"] == pytest.approx(0.6) and figures["n"] == 4
    assert figures["success_interval"] == wilson_interval([1, 0, 0, 0])


# ---------------------------------------------------------------------------------------------------------
# ColBench in miniature
SPLITS = {split: miniature_tasks(split, 60) for split in ("train", "validation", "test")}
SOME = [task for tasks in SPLITS.values() for task in tasks[:15]]


def key(task: Task) -> tuple[str, str]:
    return task.problem_description, task.ground_truth


def test_splits_are_disjoint_and_hold_no_duplicates():
    keys = [key(task) for split in ("train", "validation", "test") for task in miniature_tasks(split, 200)]
    assert len(keys) == len(set(keys)) == 600


def test_a_split_is_a_function_of_the_seed():
    assert miniature_tasks("test", 30, 1) == miniature_tasks("test", 30, 1)
    assert miniature_tasks("test", 60)[:20] == miniature_tasks("test", 20) == SPLITS["test"][:20]
    assert not {key(task) for task in miniature_tasks("test", 30, 1)} & {key(task) for task in miniature_tasks("test", 30, 2)}


def test_the_request_names_no_detail():
    for task in SOME:
        assert not re.search(r"\d", task.problem_description)
        assert not [name for name in colbench.DETAILS if name in task.problem_description]
        assert len(task.test_cases) == 10 and len(set(task.test_cases.values())) == 10


def test_the_code_says_which_details_it_has():
    everything = {name: value for name, value in zip(colbench.DETAILS, colbench.VALUES)}
    for details in ({}, {"rate": 3}, {"rounding": 5, "cycle": 7}, {"deposit": 50, "free amount": 2}, everything):
        assert miniature_details(miniature_code(details)) == details
    assert miniature_details("def other(x):\n    return x * 3") == {}


def test_references_run_and_ten_tests_tell_every_detail():
    """The reference passes; without one of its details, or with the next number in one, it does not."""
    tasks, answers, right = [], [], []
    for task in SOME:
        details = miniature_details(task.ground_truth)
        assert 1 <= len(details) <= 4
        wrong = [without(details, name) for name in details]
        wrong += [details | {name: other} for name in details for other in colbench.neighbours(details[name])]
        for answer in [task.ground_truth, *map(miniature_code, wrong)]:
            tasks.append(task), answers.append(answer), right.append(answer == task.ground_truth)
    rewards = unit_test_rewards(tasks, answers)
    assert [reward == 1.0 for reward in rewards] == right
    assert not [reward for reward in rewards if reward != reward]  # NaN: a reference that does not run


def test_the_values_we_compute_are_those_that_python_gives():
    for task in SOME[:5]:
        scope = {}
        exec(task.ground_truth, scope)
        assert colbench.miniature_values(miniature_details(task.ground_truth)) == [scope["fee"](x) for x in colbench.INPUTS]


def test_one_question_reveals_one_detail():
    human = ScriptedSimulator()
    for task in SOME:
        details = miniature_details(task.ground_truth)
        for name in colbench.DETAILS:
            dialogue = [
                {"role": "user", "content": task.problem_description},
                {"role": "assistant", "content": colbench.QUESTION.format(name)},
            ]
            fact = colbench.FACT.format(name, details.get(name)) + (colbench.ENOUGH if len(details) == 1 else "")
            told = fact if name in details else colbench.UNKNOWN
            assert human.reply([task], [dialogue]) == [told]


def test_a_file_that_cannot_be_written_is_one_line(tmp_path):
    with pytest.raises(colbench.InputError, match="nowhere/rows.jsonl: cannot be written .No such file or directory."):
        colbench.write_jsonl(tmp_path / "nowhere" / "rows.jsonl", [{}])


# --- frontend design
PAGES = colbench.miniature_page_tasks("train", 50)


def test_page_tasks_are_distinct_repeatable_and_read_back():
    assert len({(t.problem_description, t.ground_truth) for t in PAGES}) == 50
    assert PAGES == colbench.miniature_page_tasks("train", 60)[:50] != colbench.miniature_page_tasks("train", 50, 1)
    assert not {*map(str, PAGES)} & {*map(str, colbench.miniature_page_tasks("test", 50))}
    for task in PAGES:
        values = colbench.miniature_choices(task.ground_truth)
        assert list(values) == list(colbench.CHOICES) and colbench.miniature_page(values) == task.ground_truth


def test_the_designer_names_the_most_outstanding_difference():
    wanted = colbench.miniature_choices(PAGES[0].ground_truth)
    shown = {name: next(value for value in lines if value != wanted[name]) for name, lines in colbench.CHOICES.items()}
    human, told = ScriptedDesigner(), []
    for _ in colbench.CHOICES:
        reply = human.reply([PAGES[0]], [[{"role": "assistant", "content": colbench.miniature_page(shown)}]])[0]
        name = next(name for name in colbench.CHOICES if reply == colbench.PAGE_FACT.format(name, wanted[name]))
        shown[name] = wanted[name]
        told.append(name)
    assert told == list(colbench.CHOICES)
    assert human.reply([PAGES[0]], [[{"role": "assistant", "content": colbench.miniature_page(shown)}]]) == [colbench.SATISFIED]
    assert human.reply([PAGES[0]], [[{"role": "assistant", "content": "hello"}]]) == [colbench.NO_PAGE]


@pytest.mark.parametrize(
    "messages, answer",
    [
        (["OUTPUT:<html>1</html>", "I WANT TO ANSWER: <html>2</html>"], "<html>2</html>"),
        (["a thought OUTPUT: <html>1</html>", "I WANT TO ANSWER: done"], "<html>1</html>"),  # the last page of ANY turn
        (["no page", "none"], ""),
    ],
)
def test_the_answer_of_frontend_is_the_last_page(messages, answer):
    said = iter(messages)
    agent = lambda histories: [colbench.Action(next(said))]
    human = lambda tasks, dialogues: ["y" * 2000]
    trajectory = colbench.rollout(agent, human, PAGES[:1], 2, colbench.final_page, 1000)[0]
    assert trajectory.answer == answer and len(trajectory.dialogue[2]["content"]) == 1000


def test_which_dialogues_of_a_task_make_pairs_and_are_learnt_from():
    assert colbench.full_success_pairs([0.5, 1.0, 1.0, 0.0]) == [(1, 0), (1, 3)] and colbench.full_success_pairs([0.9]) == []
    assert colbench.margin_pairs([0.5, 0.75, 0.8]) == [(1, 0), (2, 0)]
    assert colbench.full_successes([0.5, 1.0, 1.0]) == [1, 2] and colbench.best_one([0.5, 0.9, 0.9]) == [1]


def test_frontend_figures_count_a_tie_as_half_a_win():
    figures = colbench.frontend_figures([0.5, 0.7, 0.9, 0.9], [0.6, 0.6, 0.9, 0.1])
    assert figures["win_rate"] == (0 + 1 + 0.5 + 1) / 4 and figures["cosine"] == pytest.approx(0.75) and figures["n"] == 4
    low, high = figures["cosine_interval"]
    assert high - low == pytest.approx(2 * 1.96 * math.sqrt((0.0625 + 0.0025 + 0.0225 * 2) / 4 / 4))
    assert "win_rate" not in colbench.frontend_figures([0.5], None)


def test_frontend_rows_have_no_test_cases(tmp_path):
    fields = colbench.BENCHMARKS["frontend"].task_fields
    colbench.save_trajectories(tmp_path / "t.jsonl", [Trajectory(PAGES[0], [], "page", 0.5)])
    assert load_trajectories(tmp_path / "t.jsonl", fields)[0].task == PAGES[0]
    with pytest.raises(InputError, match="t.jsonl, line 1, 'task': the field 'test_cases' is missing"):
        load_trajectories(tmp_path / "t.jsonl")
