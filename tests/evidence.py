"""The paper's evidence in miniature: each table and figure over several warm starts.  No test: figures.

    python tests/evidence.py table2      single-turn, zero-shot, Rejection Fine-Tuning, Multi-Turn DPO, SWEET-RL
    python tests/evidence.py search      learning rate of each kind of critic, on validation tasks (best-of-8)
    python tests/evidence.py table3      the critic without c, without 1/L, with a regression head
    python tests/evidence.py figure3a    best-of-N at every turn, by four kinds of judge
    python tests/evidence.py figure3b    success against the number of offline dialogues
    python tests/evidence.py table4      a larger model trained on the smaller one's dialogues
    python tests/evidence.py states      what each critic prefers on states made by hand
    python tests/evidence.py why         what holds SWEET-RL back: the same actor under a perfect critic, validation tasks

A seed is a world of its own: other tasks, another warm start, other dialogues.  Its folder lies in --out and is used
again, so a stopped command goes on where it was, and tables share what they have in common.  Means are over seeds,
their 95 % intervals after Student's t; a difference is taken seed by seed.  `--world N` deals every thing in the
miniature other details than the ones that the settings were chosen with.
"""

import argparse
import contextlib
import functools
import json
import math
import os
import random
import shutil
import sys
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch

import colbench
import sweet_rl
from colbench import ANSWER_MARKER, QUESTION, Task, Trajectory
from simulator import ScriptedSimulator

STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # two-sided 95 % quantiles for 1, 2, ... degrees
VARIANTS = {  # kinds of critic, with the learning rates that `search` found where the default is not the best
    "SWEET": [],
    "no c": ["--no-hint"],
    "no 1/L": ["--no-normalize", "--critic-lr", "3e-5"],
    "regression head": ["--critic", "regression", "--critic-lr", "1e-2"],
    "value function": ["--critic", "value", "--critic-lr", "3e-3"],
}
RATES = ("3e-5", "1e-4", "3e-4", "1e-3", "3e-3", "1e-2")
BEST_OF = (2, 4, 8, 16, 32)
SIZES = [225, 450, 900, 1800]  # offline dialogues
LARGER = {"hidden_size": 128, "layers": 4}  # 0.85 M parameters, 5.5 times the smaller one's


# --- runs
def run(folder: Path, *flags: str, donor: Path | None = None) -> dict | None:
    """A run of sweet_rl.py in `folder`, its output in a file beside it; returns the figures of its methods.

    What `donor`, the folder of another run, made with the same settings is linked, not made again.
    """
    argv = [*flags, "--out", str(folder)]
    if donor and not (folder / "settings.json").exists():
        share(donor, sweet_rl.Run(sweet_rl.parse_settings(argv)))
    with open(f"{folder}.log", "a") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        status = sweet_rl.main(argv)
    if status:
        raise SystemExit(f"{folder}.log says what went wrong")
    print(f"{folder.name} done", file=sys.stderr, flush=True)
    results = folder / "results.json"
    return json.loads(results.read_text())["methods"] if results.exists() else None


def share(donor: Path, into: sweet_rl.Run) -> None:
    """Hard links to those products of a run that the other's settings would make just so, but for its evaluations."""
    records = json.loads((donor / "settings.json").read_text())
    records = {name: record for name, record in records.items() if not name.startswith("eval_")}
    for product in [name for name, record in records.items() if into.shape(name) == record]:
        source, target = donor / product, into.path(product)
        shutil.copytree(source, target, copy_function=os.link) if source.is_dir() else os.link(source, target)
        into.records[product] = records[product]
    into.write_json("settings.json", into.records)


def folder(out: Path, seed: int, *parts) -> Path:
    """Where a run of a seed lies."""
    return out / "-".join([f"seed{seed}", *map(str, parts)]).replace(" ", "-").replace("/", "")


def with_critic(out: Path, seed: int, kind: str, stages: str = "critic") -> Path:
    """The folder of a seed's run with one kind of critic, in which these stages are done."""
    path = folder(out, seed, *([] if kind in ("SWEET", "judge") else [kind]))
    if path != folder(out, seed):
        flags = ["--seed", str(seed), "--methods", "sweet", "--stages", stages, *VARIANTS[kind]]
        run(path, *flags, donor=folder(out, seed))
    return path


def figures_of(path: Path) -> dict:
    """The figures of a run's methods."""
    return json.loads((path / "results.json").read_text())["methods"]


def held_out(split: str, count: int):
    """While it lasts, the first `count` tasks of `split` stand in for the test tasks."""
    tasks = sweet_rl.Sweet.tasks

    def chosen(sweet, asked: str) -> list[Task]:
        return colbench.miniature_tasks(split, count, sweet.settings.seed) if asked == "test" else tasks(sweet, asked)

    return mock.patch.object(sweet_rl.Sweet, "tasks", chosen)


def deal_world(number: int) -> None:
    """Every thing gets five other details, from likely to seldom; world 0 is the one of colbench.py."""
    rng = random.Random(number)
    for thing in colbench.THINGS if number else ():
        colbench.THINGS[thing] = tuple(rng.sample(list(colbench.DETAILS), 5))


# --- figures
def interval(values: list[float]) -> tuple[float, float]:
    """Mean over seeds and half of its 95 % interval, in percent; nan for a single seed's interval."""
    n, mean = len(values), sum(values) / len(values)
    half = STUDENT[n - 2] * (sum((v - mean) ** 2 for v in values) / (n - 1) / n) ** 0.5 if n > 1 else math.nan
    return 100 * mean, 100 * half


def mean_interval(values: list[float]) -> str:
    """The same as text."""
    return "{:.1f} ± {:.1f}".format(*interval(values))


def table(columns: list[str], rows: list[list[str]]) -> None:
    """A table in markdown."""
    for row in (columns, ["---"] * len(columns), *rows):
        print("| " + " | ".join(row) + " |")
    print(flush=True)


def method_table(runs: dict[str, list[dict]], paper: dict[str, str]) -> None:
    """A row for each name: its figures, a dict a seed, beside what the paper has."""
    rows = []
    for name, figures in runs.items():
        sampled, greedy, passed = (
            mean_interval([pick(f) for f in figures])
            for pick in (lambda f: f["success"], lambda f: f["greedy"]["success"], lambda f: f["tests_passed"])
        )
        rows.append([name, sampled, greedy, passed, paper.get(name, "")])
    table(["", "success %", "greedy success %", "tests passed %", "paper: success % (tests passed %)"], rows)


def difference_table(runs: dict[str, list[dict]], pairs: list[tuple[str, str]]) -> None:
    """Success of one minus that of another, seed by seed."""
    rows = []
    for a, b in pairs:
        sampled = [x["success"] - y["success"] for x, y in zip(runs[a], runs[b])]
        greedy = [x["greedy"]["success"] - y["greedy"]["success"] for x, y in zip(runs[a], runs[b])]
        each = ", ".join(f"{100 * value:+.1f}" for value in sampled)
        rows.append([f"{a} minus {b}", mean_interval(sampled), mean_interval(greedy), each])
    table(["points of success", "sampled", "greedy", "sampled, each seed"], rows)


def outcome(t: Trajectory) -> str:
    """How a dialogue ended."""
    if t.reward == 1.0:
        return "solved"
    if t.dialogue[-1]["content"] == colbench.GOODBYE:
        return "the human left"
    told = any(m["role"] == "user" and m["content"].endswith(colbench.ENOUGH) for m in t.dialogue)
    return "wrong with all told" if told else "answered too early"


def outcome_table(out: Path, seeds: range, methods: list[str]) -> None:
    """Why dialogues fail, sampled at temperature 1."""
    kinds, rows = ("solved", "the human left", "answered too early", "wrong with all told"), []
    for method in methods:
        ends = [
            [outcome(t) for t in colbench.load_trajectories(folder(out, seed) / f"eval_{method}.jsonl")] for seed in seeds
        ]
        rows.append([method, *(mean_interval([e.count(kind) / len(e) for e in ends]) for kind in kinds)])
    table(["% of test dialogues", *kinds], rows)


def chart(path: Path, title: str, xs: list, curves: dict[str, list[list[float]]]) -> None:
    """A picture of curves with their intervals: for each name and x the values of the seeds, from 0 to 1."""
    place = lambda i, percent: (60 + i * 400 / (len(xs) - 1), 290 - 2.5 * percent)  # noqa: E731
    parts = ['<rect width="640" height="340" fill="#fff"/>', f'<text x="20" y="22" font-weight="bold">{title}</text>']
    for percent in range(0, 101, 20):
        y = place(0, percent)[1]
        parts.append(f'<path d="M60 {y}H460" stroke="#ddd"/><text x="50" y="{y + 4}" text-anchor="end">{percent}</text>')
    parts += [f'<text x="{place(i, 0)[0]:.0f}" y="312" text-anchor="middle">{x}</text>' for i, x in enumerate(xs)]
    ends = sorted(curves, key=lambda name: -interval(curves[name][-1])[0])
    for (name, values), colour in zip(curves.items(), ("#2e9e5b", "#d0433b", "#3b6fd0", "#b8860b")):
        points = [(place(i, interval(v)[0]), 2.5 * interval(v)[1]) for i, v in enumerate(values)]
        line = " ".join(f"{x:.0f},{y:.1f}" for (x, y), _ in points)
        bars = "".join(f"M{x:.0f} {y - half:.1f}v{2 * half:.1f}" for (x, y), half in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<path d="{bars}" stroke="{colour}" stroke-opacity="0.5"/>')
        parts.append(f'<text x="475" y="{60 + 20 * ends.index(name)}" fill="{colour}">{name}</text>')
    head = '<svg xmlns="http://www.w3.org/2000/svg" width="640" height="340" font-family="monospace" font-size="13" fill="#444">'
    path.write_text(head + "".join(parts) + "</svg>\n")
    print(f"picture: {path}")


# --- the tables and figures, each a command
def table2(out: Path, seeds: range) -> None:
    """The paper's table 2, backend."""
    results = [run(folder(out, seed), "--seed", str(seed)) for seed in seeds]
    runs = {method: [r[method] for r in results] for method in sweet_rl.METHODS}
    paper = {"single-turn": "6.9 (11.8)", "zero-shot": "22.4 (34.2)", "rft": "28.2 (40.9)", "mt-dpo": "34.4 (48.0)"}
    method_table(runs, paper | {"sweet": "40.4 (56.8)"})
    difference_table(runs, [("sweet", "mt-dpo"), ("sweet", "rft"), ("mt-dpo", "rft"), ("sweet", "zero-shot")])
    outcome_table(out, seeds, ["zero-shot", "rft", "mt-dpo", "sweet"])


def search(out: Path, seeds: range) -> None:
    """Best-of-8 of the zero-shot agent on 200 validation tasks, the same learning rates for every kind of critic."""
    rows = []
    with held_out("validation", 200):
        for kind, flags in VARIANTS.items():
            found = []
            for rate in RATES:
                more = [*flags, "--critic-lr", rate]  # the last one counts
                found.append([best_of(out, seed, 8, *more, name=f"search {kind} {rate}") for seed in seeds])
            rows.append([kind, *(f"{interval(values)[0]:.1f}" for values in found)])
    table(["validation success %, best-of-8", *RATES], rows)


def best_of(out: Path, seed: int, n: int, *flags: str, name: str, donor: Path | None = None) -> float:
    """Success of the zero-shot agent with the best of n messages at every turn."""
    argv = ["--seed", str(seed), "--methods", "zero-shot", "--best-of", str(n), *flags]
    return run(folder(out, seed, name), *argv, donor=donor or folder(out, seed))["zero-shot"]["success"]


def table3(out: Path, seeds: range) -> None:
    """The paper's table 3: what the critic is made of."""
    stages = ",".join(sweet_rl.STAGES)
    kinds = ("SWEET", "no c", "no 1/L", "regression head")
    runs = {kind: [figures_of(with_critic(out, seed, kind, stages))["sweet"] for seed in seeds] for kind in kinds}
    paper = {"SWEET": "40.4 (56.8)", "no c": "31.2 (44.0)", "no 1/L": "3.6 (4.2)", "regression head": "36.2 (45.3)"}
    method_table(runs, paper)
    difference_table(runs, [("SWEET", kind) for kind in runs if kind != "SWEET"])


@torch.no_grad()
def likelihoods(sweet: sweet_rl.Sweet, critic, judge, examples: list[sweet_rl.Example]) -> list[list[list[float]]]:
    """In place of advantages: how likely the untuned agent, told c, is to say each turn itself.

    It stands in for a language model as judge, which compares two messages with c in its prompt; a tiny model
    cannot follow such a prompt, but its warm-up has taught it what to say when it reads c.
    """
    scores: list[list[list[float]]] = []
    for batch in sweet_rl.micro_batches(examples, sweet.settings.micro_batch):
        logps, turn_ids = sweet.trainer.log_probs(judge, batch)  # (R, T)
        rows = iter(sweet_rl.turn_advantages(logps, 0 * logps, turn_ids, normalize=False).tolist())
        scores += [[next(rows) for _ in example.branches] for example in batch]
    return scores


def figure3a(out: Path, seeds: range) -> None:
    """Best-of-N: the fixed zero-shot agent says what a critic ranks first of N samples, on the first 150 test tasks."""
    one, curves = [run_zero_shot(out, seed) for seed in seeds], {}
    for kind in ("SWEET", "no c", "value function", "judge"):
        donors = {seed: with_critic(out, seed, kind) for seed in seeds}
        score = likelihoods if kind == "judge" else sweet_rl.Sweet.advantages
        with held_out("test", 150), mock.patch.object(sweet_rl.Sweet, "advantages", score):
            made = [
                [best_of(out, s, n, *VARIANTS.get(kind, []), name=f"best-of-{n} {kind}", donor=donors[s]) for s in seeds]
                for n in BEST_OF
            ]
        curves[kind] = [one, *made]
    rows = [[kind, *map(mean_interval, curve)] for kind, curve in curves.items()]
    table(["success %, best of N at every turn", "N = 1", *map(str, BEST_OF)], rows)
    chart(out / "figure3a.svg", "success %, the best of N samples at every turn", [1, *BEST_OF], curves)
    print("paper: SWEET reaches 44.3; judge, value function and no c end at 37.3, 34.2 and 28.5 in some order")


def run_zero_shot(out: Path, seed: int) -> float:
    """Success of the zero-shot agent, N = 1, on the same tasks."""
    trajectories = colbench.load_trajectories(folder(out, seed) / "eval_zero-shot.jsonl")[:150]
    return sum(t.reward == 1.0 for t in trajectories) / len(trajectories)


def figure3b(out: Path, seeds: range) -> None:
    """Success against the number of offline dialogues, each size a part of the next."""
    sizes = {size: [figures_at(out, seed, size) for seed in seeds] for size in SIZES}
    zero = [figures_of(folder(out, seed))["zero-shot"] for seed in seeds]
    for how, pick in (("sampled", lambda f: f["success"]), ("greedy", lambda f: f["greedy"]["success"])):
        curves = {
            method: [list(map(pick, zero)), *([pick(f[method]) for f in made] for made in sizes.values())]
            for method in ("rft", "mt-dpo", "sweet")
        }
        rows = [[method, *map(mean_interval, curve)] for method, curve in curves.items()]
        table([f"success %, {how}, by offline dialogues", "0", *map(str, sizes)], rows)
        chart(out / f"figure3b-{how}.svg", f"success %, {how}, by offline dialogues", [0, *sizes], curves)
    print(f"with {SIZES[-1]} dialogues")
    most = {method: [f[method] for f in sizes[SIZES[-1]]] for method in ("rft", "mt-dpo", "sweet")}
    difference_table(most, [("sweet", "mt-dpo"), ("sweet", "rft"), ("mt-dpo", "rft")])
    print("paper at 15,000: SWEET 40.4, Multi-Turn DPO 34.4, RFT 28.2; SWEET starts below Multi-Turn DPO at 3,000")


def figures_at(out: Path, seed: int, size: int) -> dict:
    """The figures of the trained methods on `size` dialogues: the first of table 2's 900, or more of them."""
    if size == 900:
        return figures_of(folder(out, seed))
    path = folder(out, seed, f"{size}.jsonl")
    rows = colbench.load_trajectories(folder(out, seed) / "trajectories.jsonl")
    tasks = len(rows) // 3  # three blocks of a dialogue per task
    if size < 900:
        rows = [rows[block * tasks + i] for block in range(3) for i in range(size // 3)]
    else:
        rows += more_dialogues(out, seed, (size - 900) // 3)
    colbench.save_trajectories(path, rows)
    flags = ["--seed", str(seed), "--methods", "rft,mt-dpo,sweet", "--trajectories", str(path)]
    return run(folder(out, seed, size), *flags, donor=folder(out, seed))


def more_dialogues(out: Path, seed: int, count: int) -> list[Trajectory]:
    """Three dialogues on each of `count` more tasks, which neither training nor warm-up has seen."""
    world = sweet_rl.MINIATURES["backend"]
    used = world.train_tasks + world.warm_up_tasks
    tasks, path = colbench.miniature_tasks("train", used + count, seed)[used:], folder(out, seed, "more-tasks.jsonl")
    colbench.write_jsonl(path, [vars(task) for task in tasks])
    more = ["--train-tasks", str(path), "--stages", "collect", "--methods", "rft"]
    run(folder(out, seed, "more"), "--seed", str(seed), *more, donor=folder(out, seed))
    return colbench.load_trajectories(folder(out, seed, "more") / "trajectories.jsonl")


def table4(out: Path, seeds: range) -> None:
    """A larger model, warmed up in the same way but for 6 epochs, trained on the dialogues of the smaller one."""
    larger = {"tiny_model": functools.partial(sweet_rl.tiny_model, **LARGER), "WARM_UP_EPOCHS": 6}
    results = []
    for seed in seeds:
        path = folder(out, seed, "larger")
        flags = ["--seed", str(seed), "--methods", "zero-shot,rft,mt-dpo,sweet"]
        flags += ["--trajectories", str(folder(out, seed) / "trajectories.jsonl")]
        if not (path / "base").exists():  # a base without a record is one that was put there by hand
            with mock.patch.multiple(sweet_rl, **larger):
                sweet_rl.Sweet(sweet_rl.parse_settings([*flags, "--out", str(path)])).warm_up(path / "base")
        results.append(run(path, *flags))
    runs = {method: [r[method] for r in results] for method in results[0]}
    paper = {"zero-shot": "35.0 (48.0)", "rft": "31.9 (45.5)", "mt-dpo": "41.8 (56.7)", "sweet": "45.6 (60.2)"}
    method_table(runs, paper)
    difference_table(runs, [("sweet", "mt-dpo"), ("sweet", "rft"), ("sweet", "zero-shot"), ("rft", "zero-shot")])


# --- states made by hand
def states(out: Path, seeds: range) -> None:
    """How often a critic prefers the right one of two messages, on states of 200 validation tasks."""
    rows = []
    for kind in [*VARIANTS, "judge"]:
        made = [state_accuracies(out, seed, kind) for seed in seeds]
        rows.append([kind, *(mean_interval([accuracies[name] for accuracies in made]) for name in made[0])])
    table(["% right", *made[0]], rows)


def state_accuracies(out: Path, seed: int, kind: str) -> dict[str, float]:
    """A critic's accuracy on every kind of state, and on pairs of held-out dialogues."""
    path = with_critic(out, seed, kind)
    with contextlib.redirect_stdout(sys.stderr):
        sweet = sweet_rl.Sweet(sweet_rl.parse_settings(["--seed", str(seed), *VARIANTS.get(kind, []), "--out", str(path)]))
    (base, tokenizer, encoder), critic = sweet.model("base"), sweet.model("critic")[0]
    score = functools.partial(likelihoods, sweet) if kind == "judge" else sweet.advantages
    tasks = colbench.miniature_tasks("validation", 200, seed)
    accuracies = {}
    for name, pairs in hand_made_states(tasks, random.Random(seed)).items():
        examples = [
            sweet_rl.Example(
                encoder.candidates(sweet.with_system(history), [message(right), message(wrong)], sweet.hint(task.ground_truth))
            )
            for task, history, right, wrong in pairs
        ]
        found = score(critic, base, examples)
        accuracies[name] = sum(right[0] > wrong[0] for right, wrong in found) / len(found)
    torch.manual_seed(seed)
    played = colbench.rollout(sweet.agent(base, tokenizer), ScriptedSimulator().reply, tasks * 3)
    rewards = colbench.unit_test_rewards([t.task for t in played], [t.answer for t in played])
    solved = [next((i for i in range(i % 200, 600, 200) if rewards[i] == 1.0), None) for i in range(600)]
    pairs = [(better, i) for i, better in enumerate(solved) if better is not None and rewards[i] < 1.0]
    branch = lambda t: encoder.dialogue(sweet.with_system(t.dialogue), sweet.hint(t.task.ground_truth))  # noqa: E731
    found = score(critic, base, [sweet_rl.Example([branch(played[i]) for i in pair]) for pair in pairs])
    total = (lambda turns: turns[-1]) if kind == "value function" else sum  # a value is of what comes at the end
    counts = [len(played[i].turns) for pair in pairs for i in pair]
    sums = [total(turns[:count]) for turns, count in zip([turns for pair in found for turns in pair], counts)]
    accuracies["whole dialogues"] = sum(a > b for a, b in zip(sums[::2], sums[1::2])) / len(pairs)
    return accuracies


def message(text: str) -> dict:
    """What an agent says."""
    return {"role": "assistant", "content": text}


def hand_made_states(tasks: list[Task], rng: random.Random) -> dict[str, list[tuple[Task, list[dict], str, str]]]:
    """(task, history, right message, wrong message) of every kind."""
    states: dict[str, list] = {}
    for task in tasks:
        details = colbench.miniature_details(task.ground_truth)
        names = rng.sample(list(details), len(details))
        thing = next(thing for thing in colbench.THINGS if f" {thing}." in task.problem_description)
        absent = QUESTION.format(rng.choice([name for name in colbench.THINGS[thing] if name not in details]))
        told = names[: rng.randrange(len(names))]  # not all of them
        early, late = asked(task, told), asked(task, names)
        wanted = QUESTION.format(rng.choice([name for name in names if name not in told]))
        answer = lambda details: ANSWER_MARKER + "\n" + colbench.miniature_code(details)  # noqa: E731
        hasty = answer({name: details[name] for name in told})
        slip = rng.choice(names)
        miscopied = answer(details | {slip: rng.choice(colbench.neighbours(details[slip]))})
        again = [("wanted over repeated question", early, wanted, QUESTION.format(rng.choice(told)))] if told else []
        for kind, history, right, wrong in (
            ("wanted over absent question", early, wanted, absent),
            *again,
            ("wanted question over early answer", early, wanted, hasty),
            ("absent question over early answer", early, absent, hasty),
            ("answer over needless question", late, answer(details), absent),
            ("right over miscopied answer", late, answer(details), miscopied),
        ):
            states.setdefault(kind, []).append((task, history, right, wrong))
    return states


def asked(task: Task, names: list[str]) -> list[dict]:
    """The dialogue in which these details were asked for."""
    dialogue = [{"role": "user", "content": task.problem_description}]
    for name in names:
        dialogue.append(message(QUESTION.format(name)))
        dialogue.append({"role": "user", "content": ScriptedSimulator().reply_one(task, dialogue)})
    return dialogue


# --- what holds SWEET-RL back
def why(out: Path, seeds: range) -> None:
    """The actor's stage as it is, without pairs that choose a repeated question, and on a perfect critic's ranking."""
    changes = {"as it is": None, "no repeated question": without_repeats, "perfect critic": ranked_perfectly}
    runs: dict[str, list[dict]] = {}
    for name, change in changes.items():
        for seed in seeds:
            path = folder(out, seed, "why", name)
            if change:
                file, rows = change(folder(out, seed))
                path.mkdir(exist_ok=True)
                colbench.write_jsonl(path / file, rows)  # a file without a record is one that was put there by hand
            flags = ["--seed", str(seed), "--methods", "sweet" if change else "zero-shot,rft,mt-dpo,sweet"]
            with held_out("validation", 500):
                figures = run(path, *flags, donor=folder(out, seed))
            for method in figures:
                runs.setdefault(method + (f", {name}" if method == "sweet" else ""), []).append(figures[method])
    method_table(runs, {})


def without_repeats(donor: Path) -> tuple[str, list[dict]]:
    """The turn pairs of a run whose chosen message was not said before in the dialogue."""
    rows = colbench.read_jsonl(donor / "turn_pairs.jsonl", {"prompt": list})
    said = lambda row: [m["content"] for m in row["prompt"] if m["role"] == "assistant"]  # noqa: E731
    return "turn_pairs.jsonl", [row for row in rows if row["chosen"][0]["content"] not in said(row)]


def ranked_perfectly(donor: Path) -> tuple[str, list[dict]]:
    """The candidates of a run with advantages by a script that knows the game and reads c."""
    rows = colbench.read_jsonl(donor / "candidates.jsonl", {"messages": list})
    return "candidates.jsonl", [row | {"advantages": [perfect_advantage(row, c) for c in row["candidates"]]} for row in rows]


def perfect_advantage(row: dict, candidate: str) -> float:
    """2 for the right answer or a wanted question, 1 for one that such a thing may want, 0 for a wrong answer or a repetition."""
    details = colbench.miniature_details(row["ground_truth"])
    thing = next(thing for thing in colbench.THINGS if f" {thing}." in row["messages"][1]["content"])
    if candidate.startswith(ANSWER_MARKER):
        return 2 if colbench.miniature_details(candidate) == details else 0
    name = next((name for name in colbench.DETAILS if candidate == QUESTION.format(name)), None)
    if name is None:
        return -1
    if any(message["content"] == candidate for message in row["messages"]):
        return 0
    return 2 if name in details else 1 if name in colbench.THINGS[thing] else 0.5


COMMANDS = {  # name: what it runs, how many seeds
    "table2": (table2, 5),
    "search": (search, 2),
    "table3": (table3, 3),
    "figure3a": (figure3a, 3),
    "figure3b": (figure3b, 3),
    "table4": (table4, 3),
    "states": (states, 3),
    "why": (why, 3),
}


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
    parser.add_argument("what", choices=COMMANDS)
    parser.add_argument("--out", type=Path, default="out/evidence")
    parser.add_argument("--seeds", type=int, help="how many warm starts, from seed 0 on")
    parser.add_argument("--world", type=int, default=0)
    parser.add_argument("--sizes", help="of figure3b: numbers of offline dialogues, by commas")
    given = parser.parse_args()
    command, seeds = COMMANDS[given.what]
    out = given.out / f"world{given.world}"
    out.mkdir(parents=True, exist_ok=True)
    deal_world(given.world)
    SIZES[:] = map(int, given.sizes.split(",")) if given.sizes else SIZES
    command(out, range(given.seeds or seeds))


if __name__ == "__main__":
    main()
