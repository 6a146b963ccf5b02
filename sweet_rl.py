"""SWEET-RL from scratch: train an agent on turn-wise advantages (Zhou et al., 2025, arXiv 2503.15478).

An agent talks with a human for up to 10 turns and then hands over an answer; the reward comes only then.
Which turn earned it?  SWEET-RL trains a critic that may read c, the hidden reference solution:

    A_theta(o_t, a_t, c) = 1/L sum_l log[ pi_theta(a_t^l | o_t, a_t^<l, c) / pi_ref(a_t^l | o_t, a_t^<l, c) ]   (3)
    J_A  = -log sigma( sum_t beta A(o_t+, a_t+, c) - sum_t beta A(o_t-, a_t-, c) )                              (2)

on pairs of whole dialogues about one task, + the one with the higher reward, and then uses A as the reward of
single turns for an actor that never sees c, by DPO on pairs of candidate messages for the same history:

    J_pi = -log sigma( beta' log[pi_phi(a+|o) / pi_ref(a+|o)] - beta' log[pi_phi(a-|o) / pi_ref(a-|o)] )        (4)

The seven stages, each from files to files in --out (section 8, in this order)
    collect      play offline dialogues with a simulated human     -> trajectories.jsonl
    pairs        better against worse dialogue of a task           -> trajectory_pairs.jsonl
    critic       equations 2 and 3                                 -> critic/
    candidates   16 messages a turn, scored by the critic          -> candidates.jsonl
    turn-pairs   top half against bottom half                      -> turn_pairs.jsonl
    actor        equation 4; beside it the baselines               -> actor/, rft/, mt-dpo/
    evaluate     held-out tasks                                    -> eval_*.jsonl, results.json

Departures from the paper: none in the equations, to which the likelihood terms of its table 5 are added.  From the
official code, where it departs from the paper: the critic's loss sums per-turn means (not one mean over the
dialogue), and scoring uses a reference that reads c.
"""

import argparse
import base64
import contextlib
import copy
import ctypes
import dataclasses
import datetime
import errno
import fcntl
import functools
import gc
import hashlib
import importlib.util
import io
import itertools
import json
import math
import os
import random
import re
import shutil
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

STOPPED = "\nstopped; the same command goes on from what is finished"
if __name__ == "__main__":  # Ctrl-C in the seconds that torch takes to be imported is one line as well
    sys.excepthook = (
        lambda kind, *rest: print(STOPPED, file=sys.stderr) if kind is KeyboardInterrupt else sys.__excepthook__(kind, *rest)
    )

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

import colbench
from colbench import Failure, InputError, Message, Task, Trajectory
from simulator import (
    ChatModel,
    ChatServer,
    KeyboardSimulator,
    LLMSimulator,
    ScriptedDesigner,
    ScriptedSimulator,
    SeeingChatModel,
    ServerAgent,
    ServerSimulator,
    chat_prompt,
    end_ids,
    page_pictures,
    text_ids,
)

RANK, RANKS = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE")) if dist.is_torchelastic_launched() else (0, 1)


# ---------------------------------------------------------------------------------------------------------
# 0. One process, or those that torchrun started: each has a share of what is trained, and to sample and score with a whole
#    copy or, with --shard, a share as well
@contextlib.contextmanager
def processes():
    """Join the processes; yields what says whether this one is the first to end early.

    That of rank 0 alone prints and writes.  One that ends early takes all others with it, and one line says why.
    """
    if RANKS == 1:
        yield lambda: True
        return
    if cuda := torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if RANK > 0:
        tqdm.__init__ = functools.partialmethod(tqdm.__init__, disable=True)
    store = next(dist.rendezvous("env://"))[0]
    forever = datetime.timedelta(days=365)  # torchrun ends those who wait for one that is gone
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(backend, store=store, rank=RANK, world_size=RANKS, timeout=forever)
    try:
        with contextlib.redirect_stdout(sys.stdout if RANK == 0 else io.StringIO()):
            yield lambda: store.add("ended early", 1) == 1
    finally:
        gc.collect()  # sharded models refer to themselves, and to the group
        dist.destroy_process_group()


def gathered(value) -> list:
    """The value of each process, in order, in every one; None to wait for each other."""
    take_turn()
    values = [value] * RANKS
    if RANKS > 1:
        dist.all_gather_object(values, value)
    return values


SHARDED: weakref.WeakValueDictionary = weakref.WeakValueDictionary()  # {number: model}, the same in every process
NUMBERS, NO_MODEL = itertools.count(), sys.maxsize


def take_turn(wanted: int = NO_MODEL) -> None:
    """A pass through a sharded model takes every process: name the model, and take part in others' passes until it is its turn.

    So each may have as many passes as it likes, of tasks, turns and tokens of its own.  One that has none left names no
    model, and is back when none of the others has any.
    """
    while RANKS > 1:
        turn = torch.tensor(wanted)
        dist.all_reduce(turn, dist.ReduceOp.MIN)
        if turn == wanted:
            return
        SHARDED[int(turn)].empty_pass()


# ---------------------------------------------------------------------------------------------------------
# 1. Settings
STAGES = ("collect", "pairs", "critic", "candidates", "turn-pairs", "actor", "evaluate")
METHODS = ("single-turn", "zero-shot", "rft", "mt-dpo", "sweet")


def option(group: str, tiny, paper, help: str, frontend: dict | None = None, **more):
    """A setting: its value for the tiny model, its value from the paper, and one sentence on what it does.

    `frontend` holds what is different there, by "tiny" and "paper".
    """
    given = {"group": group, "tiny": tiny, "paper": paper, "help": help, "frontend": frontend or {}}
    return field(default=None, metadata=given | more)


@dataclass
class Settings:
    """Every flag.  The first value is for the built-in tiny model, the second, from table 5 of the paper, for --model."""

    # task
    task: str = option("task", "backend", "backend", "what to collaborate on", choices=list(colbench.BENCHMARKS))
    max_turns: int = option("task", 10, 10, "agent turns in a dialogue at the most")
    # models
    model: str = option("models", "tiny", None, "HF folder or hub name; without it, a tiny model is built and warmed up")
    simulator: str = option(
        "models", "scripted", None, "the human: scripted, keyboard, an HF model, or a URL (default: the untouched --model)"
    )
    lora: int = option(
        "models", None, None, "train adapters of this rank over a frozen base (ours; chosen where all weights do not fit)"
    )
    shard: bool = option(
        "models", False, False, "torchrun: no whole copies to sample and score with, shares (ours; chosen where copies do not fit)"
    )
    server_model: str = option("models", None, None, "model name to ask a --simulator URL for (default: its first)")
    agent: str = option("models", None, None, "URL of a server that plays the untouched agent, candidates too")
    agent_model: str = option("models", None, None, "model name to ask an --agent URL for (default: its first)")
    agent_prompt: str = option("models", None, None, "file with the agent's system prompt")
    human_prompt: str = option("models", None, None, "file with the prompt of a human played by a model")
    stylesheet: str = option("models", None, None, "frontend: file of the pages' stylesheet, for a machine without network")
    embedding: str = option(
        "models", "pixels", "openai/clip-vit-base-patch32", "frontend: CLIP model that compares pictures, or pixels (ours)"
    )
    critic_model: str = option(
        "models", None, None, "frontend: vision-language model as the critic, with a head; it reads c as a picture (paper's)"
    )
    # data
    tasks: str = option("data", None, colbench.HUB_DATASET, "held-out tasks: JSONL file or hub dataset", {"paper": None})
    train_tasks: str = option("data", None, None, "tasks to collect dialogues on: JSONL file (default: --tasks FILE)")
    trajectories: str = option(
        "data", None, colbench.HUB_DATASET, "offline dialogues, instead of collecting: JSONL file or hub dataset", {"paper": None}
    )
    num_tasks: int = option("data", None, None, "use the first N tasks of each split only")
    dialogues: int = option("data", 3, 3, "dialogues to collect per task", {"paper": 6})
    # method
    methods: str = option("method", ",".join(METHODS), ",".join(METHODS), "what to train and evaluate, by commas")
    critic: str = option(
        "method", "logprob", "logprob", "the critic: eq. 3, or, as ablations, a head trained by eq. 2 or to predict success",
        choices=["logprob", "regression", "value"],
    )  # fmt: skip
    no_hint: bool = option("method", False, False, "ablation: a critic that does not read c")
    no_normalize: bool = option("method", False, False, "ablation: equation 3 without its 1/L")
    candidates: int = option("method", 16, 16, "candidate messages per turn")
    turn_fraction: float = option("method", 1.0, 0.1, "fraction of the dialogues whose turns get candidates")
    pairs_per_turn: int = option("method", 4, 4, "pairs of candidates per turn")
    best_of: int = option("method", None, None, "evaluate with the best of N samples at every turn, by the critic, who reads c")
    critic_beta: float = option("method", 30.0, 0.1, "beta of equation 2")
    actor_beta: float = option("method", 0.2, 0.1, "beta' of equation 4")
    mt_dpo_beta: float = option("method", 0.3, 0.1, "beta of Multi-Turn DPO")
    critic_nll: float = option("method", 0.01, 0.01, "weight of the critic's likelihood term")
    actor_nll: float = option("method", 1.0, 0.01, "weight of the actor's likelihood term")
    mt_dpo_nll: float = option("method", 0.5, 0.01, "weight of Multi-Turn DPO's likelihood term")
    # training
    critic_lr: float = option("training", 1e-4, 2e-7, "learning rate of the critic")
    actor_lr: float = option("training", 2e-4, 2e-7, "learning rate of the actor")
    rft_lr: float = option("training", 1e-3, 2e-7, "learning rate of Rejection Fine-Tuning")
    mt_dpo_lr: float = option("training", 8e-4, 2e-7, "learning rate of Multi-Turn DPO")
    lora_lr: float = option("training", 2e-3, 2e-6, "learning rate of --lora for the rates above that are not given (ours)")
    critic_epochs: int = option("training", 4, 4, "epochs of the critic", {"paper": 8})
    actor_epochs: int = option("training", 1, 1, "epochs of the actor")
    rft_epochs: int = option("training", 4, 4, "epochs of Rejection Fine-Tuning", {"paper": 8})
    mt_dpo_epochs: int = option("training", 2, 4, "epochs of Multi-Turn DPO", {"paper": 8})
    batch_size: int = option("training", 32, 8, "pairs per optimizer step")
    rft_batch_size: int = option("training", 32, 32, "dialogues per optimizer step of Rejection Fine-Tuning")
    max_length: int = option("training", 512, 8192, "longest dialogue in tokens; longer ones are left out, and counted")
    seed: int = option("training", 0, 0, "seed of everything random")
    # machine
    plan: bool = option("machine", False, False, "print the memory that each stage needs and what there is, and stop")
    out: str = option("machine", None, None, "folder of all files (default: out/<task>-<model>)")
    against: str = option("machine", None, None, "frontend: eval_*.jsonl file that win rates are against (default: zero-shot's)")
    stages: str = option("machine", ",".join(STAGES), ",".join(STAGES), "stages to run, by commas")
    device: str = option("machine", None, None, "cpu, cuda or mps (default: the best one there is)")
    precision: str = option(
        "machine", None, None, "float32 or bfloat16 compute; trained weights stay float32", choices=["float32", "bfloat16"]
    )
    micro_batch: int = option("machine", 64, 4, "dialogues or candidates in memory at once while training and scoring")
    generate_batch: int = option("machine", 1024, 32, "dialogues or candidates sampled at once")
    max_new_tokens: int = option("machine", 40, 1024, "longest message of the agent in tokens")

    @property
    def is_tiny(self) -> bool:
        return self.model == "tiny"

    @property
    def human_model(self) -> str | None:
        """The model that plays the human here; None where a script, a reader or a server does."""
        elsewhere = self.simulator in ("scripted", "tiny", "keyboard") or self.simulator.startswith(("http://", "https://"))
        return None if elsewhere else self.simulator


def parse_settings(argv: list[str]) -> Settings:
    """Settings from the command line; what is not given comes from the tiny or from the paper's preset."""
    parser = argparse.ArgumentParser(
        prog="sweet_rl.py",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=__doc__.split("\n\nDepartures")[0],
    )
    groups: dict = {}
    for f in dataclasses.fields(Settings):
        m = f.metadata
        group = groups.setdefault(m["group"], parser.add_argument_group(m["group"]))
        defaults = [f"{m[key]} {who}" for key, who in (("tiny", "tiny"), ("paper", "with --model")) if m[key] is not None]
        default = f"{m['tiny']}" if m["tiny"] == m["paper"] else ", ".join(defaults)
        default += "".join(f"; frontend: {value}" for value in m["frontend"].values() if value is not None)
        value = {"type": f.type, "choices": m.get("choices"), "metavar": f.type.__name__.upper()}
        group.add_argument(
            "--" + f.name.replace("_", "-"), **({"action": "store_const", "const": True} if f.type is bool else value),
            help=m["help"] + ("" if m["tiny"] is None and m["paper"] is None else f" ({default})").replace("%", "%%"),
        )  # fmt: skip
    given = parser.parse_args(argv)
    preset = "paper" if given.model not in (None, "tiny") else "tiny"
    values = {f.name: f.metadata[preset] for f in dataclasses.fields(Settings)}
    if given.task == "frontend":
        values |= {f.name: f.metadata["frontend"].get(preset, values[f.name]) for f in dataclasses.fields(Settings)}
    values |= {name: value for name, value in vars(given).items() if value is not None}
    return check_settings(Settings(**values), given)


def check_settings(s: Settings, given: argparse.Namespace) -> Settings:
    """Fill in what depends on other flags, and refuse what cannot be meant."""
    for name, known in (("stages", STAGES), ("methods", METHODS)):
        setattr(s, name, ",".join(word.strip() for word in getattr(s, name).split(",")))
        unknown = set(getattr(s, name).split(",")) - set(known)
        if unknown:
            raise InputError(f"--{name}: unknown {', '.join(sorted(unknown)) or 'nothing'} (expected some of {','.join(known)})")
    check_numbers(s)
    for name in ("critic_model", "stylesheet", "embedding", "against"):
        if getattr(given, name) is not None and s.task != "frontend":
            raise InputError(f"--{name.replace('_', '-')}: expected with --task frontend only, a function has no picture")
    if s.critic_model:
        s.critic = "value" if s.critic == "value" else "regression"
    if s.no_normalize and s.critic != "logprob":
        raise InputError(f"--no-normalize: expected with --critic logprob only, a {s.critic} head has no 1/L")
    if given.tasks and not given.trajectories:
        s.trajectories = None  # someone's own tasks: the dialogues are collected on them, not taken from the hub
    if s.tasks and not s.trajectories and not s.train_tasks:
        s.train_tasks = s.tasks
    if not s.is_tiny and not s.tasks:
        why = f"ColBench's {s.task} tasks are not on the hub, the README says how to make them"
        raise InputError(f"--tasks: expected a JSONL file; {why}")
    if s.plan and s.is_tiny:
        raise InputError("--plan: expected with --model; the tiny model fits anywhere")
    alone = {f"--critic {s.critic}": s.critic != "logprob", "--simulator keyboard": s.simulator == "keyboard"}
    for flag, chosen in alone.items():
        if chosen and RANKS > 1:
            raise InputError(f"{flag}: expected in one process only, torchrun started {RANKS}")
    if s.shard and RANKS == 1:
        raise InputError("--shard: expected with torchrun only, one process has no others to share with")
    if s.lora and not importlib.util.find_spec("peft"):
        raise InputError("--lora: expected the package peft, which is not installed here (pip install peft)")
    for url in (s.agent, s.simulator):
        if "://" in (url or ""):
            ChatServer(url, "not asked yet")  # an address with a key in it is refused before it is written anywhere
    for name in ("critic_lr", "actor_lr", "rft_lr", "mt_dpo_lr") if s.lora else ():
        if getattr(given, name) is None:
            setattr(s, name, s.lora_lr)
    s.simulator = s.simulator or s.model
    s.out = f"out/{s.task}-{Path(s.model).name}" if s.out is None else s.out
    if not s.out.strip():
        raise InputError("--out: expected a folder, got nothing")
    return s


def check_numbers(s: Settings) -> None:
    """Refuse numbers that no setting can have."""
    for f in dataclasses.fields(Settings):
        value = getattr(s, f.name)
        number = f.type in (int, float) and value is not None and f.name != "seed"
        if number and (not 0 <= value < math.inf or value == 0 and f.type is int):
            raise InputError(f"--{f.name.replace('_', '-')}: expected a positive number, got {value}")
    if not 0 < s.turn_fraction <= 1:
        raise InputError(f"--turn-fraction: expected more than 0 and at most 1, got {s.turn_fraction}")


# ---------------------------------------------------------------------------------------------------------
# 2. Models
def pick_device(s: Settings) -> tuple[torch.device, torch.dtype]:
    """Device and compute precision, printed with the reason.  Weights in training are float32 on every device: at
    the paper's learning rate of 2e-7 a bfloat16 weight, with its 8 bits of mantissa, would never change.  Frozen
    weights, which only sample and score, never move in any case, and are held in the compute precision."""
    found = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.empty(0, device=s.device or found).device
    except (RuntimeError, AssertionError):  # what torch raises for an unknown name, and for an absent device
        raise InputError(f"--device {s.device}: not to be had here (found: {found})") from None
    if RANKS > 1 and device.type not in ("cpu", "cuda"):
        raise InputError(f"--device {device}: expected cpu or cuda where torchrun starts {RANKS} processes")
    default = "bfloat16" if device.type == "cuda" else "float32"
    precision = s.precision or default
    why_device = "--device" if s.device else "the best device that torch finds here"
    why_precision = "--precision" if s.precision else f"the default on {device.type}"
    print(f"device: {device} ({why_device}); compute: {precision} ({why_precision}), trained weights float32")
    return device, getattr(torch, precision)


def read_config(name: str):
    """The configuration of a model in a folder or on the hub."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=False)
    except Exception as error:
        raise no_model(name, error) from None


def no_model(name: str, error: Exception) -> InputError:
    """Not found, not a model, code or pickles in it, no network: transformers raises many kinds."""
    reason = str(error).strip().split("\n")[0][:200]
    return InputError(f"model {name}: cannot be loaded from a folder or from the hub: {reason}")


def load_model(name: str, device, dtype: torch.dtype = torch.float32, sees: bool = False) -> tuple:
    """(model, tokenizer) from a folder or the hub, weights in `dtype`, from safetensors only, ready to score.

    One that `sees` is a vision-language model.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
        model = kind.from_pretrained(name, dtype=dtype, use_safetensors=True, trust_remote_code=False)
    except Exception as error:
        raise no_model(name, error) from None
    if not tokenizer.chat_template:
        raise InputError(f"model {name}: its tokenizer has no chat template; an instruct model is needed")
    return model.to(device).eval(), tokenizer


def recompute_activations(model) -> None:
    """In training, compute activations again when their gradient is due, where the model can."""
    if model.supports_gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})


@functools.cache
def empty_model(name: str, sees: bool = False):
    """The model of a config.json without its weights, on the meta device: for arithmetic, and to be filled."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    try:
        with torch.device("meta"):
            return (AutoModelForImageTextToText if sees else AutoModelForCausalLM).from_config(read_config(name))
    except ValueError as error:  # a model of another kind
        raise no_model(name, error) from None


def adapted(base, adapter: int | Path):
    """`base` with LoRA adapters, new ones of a rank or those of a folder, in float32 and with alpha = rank.

    Its modules are copied, its weights are not: one frozen base in memory is agent, critic and, bare, the reference.
    On the meta device the adapters have no values either.
    """
    import peft

    shared = copy.deepcopy(base, {id(tensor): tensor for tensor in itertools.chain(base.parameters(), base.buffers())})
    with warnings.catch_warnings():  # peft asks transformers by an old name
        warnings.simplefilter("ignore", FutureWarning)
        if isinstance(adapter, Path):
            if not (adapter / "adapter_model.safetensors").exists():  # peft would take a pickle instead
                raise InputError(f"{adapter}: expected adapter_model.safetensors, found none")
            try:
                if base.device.type != "meta":
                    return peft.PeftModel.from_pretrained(shared, adapter)
                return peft.get_peft_model(shared, peft.PeftConfig.from_pretrained(adapter))
            except Exception as error:
                raise no_model(str(adapter), error) from None
        config = peft.LoraConfig(r=adapter, lora_alpha=adapter, target_modules="all-linear", task_type="CAUSAL_LM")
        return peft.get_peft_model(shared, config)


# --- a model over several processes
def load_sharded(name: str, device, dtype: torch.dtype, compute: torch.dtype, adapter: int | Path | None = None) -> tuple:
    """`load_model`, sharded; with adapters these are split as well."""
    whole, tokenizer = load_model(name, "cpu", dtype) if RANK == 0 else (None, None)
    tokenizer, empty = gathered(tokenizer)[0], copy.deepcopy(empty_model(name)).to(dtype)
    if adapter:
        whole, empty = adapted(whole, adapter) if RANK == 0 else None, adapted(empty, adapter)
    shard(bare(whole), bare(empty), device, compute)
    return empty.eval(), tokenizer


def bare(model):
    """The language model itself, where adapters are wrapped around it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def shard(whole, empty, device, dtype: torch.dtype) -> None:
    """FSDP2: `empty`, on the meta device, gets the weights of `whole`, which the first process has; it is split over all.

    Each process keeps a share of every weight; a layer is whole, in `dtype`, only while it is at work.  What is called is
    `model.log_probs` or the model itself: log_probs reads the embeddings past the model's own forward.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    known = (dict(whole.named_buffers()), whole.generation_config, takes_trees(whole)) if RANK == 0 else None
    buffers, empty.generation_config, empty.takes_trees = gathered(known)[0]
    for name, buffer in buffers.items():
        module, _, own = name.rpartition(".")
        setattr(empty.get_submodule(module), own, buffer.to(device))
    mesh = dist.init_device_mesh(device.type, (RANKS,))
    policy = MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32)
    sources = [*layers_of(whole), whole] if RANK == 0 else []
    for part, source in itertools.zip_longest([*layers_of(empty), empty], sources):
        given, state = source.state_dict() if RANK == 0 else {}, {}
        for name, slot in part.state_dict().items():
            if slot.is_meta:
                state[name] = given[name].to(device) if RANK == 0 else torch.empty_like(slot, device=device)
                dist.broadcast(state[name], 0)
        part.load_state_dict(state, strict=False, assign=True)
        if part is empty:
            empty.tie_weights()  # those that are one tensor in two places have been handed out for both
        fully_shard(part, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
    empty.log_probs = functools.partial(log_probs, empty)
    register_fsdp_forward_method(empty, "log_probs")
    in_turn(empty, device)


def in_turn(model, device) -> None:
    """Every pass through a sharded model waits for its turn."""
    number, pass_through = next(NUMBERS), model.log_probs
    SHARDED[number] = model
    model.empty_pass = torch.no_grad()(lambda: pass_through(pack([[Branch([[0]], [[0]])]], device, plain=True)))
    model.log_probs = lambda packed: (take_turn(number), pass_through(packed))[1]
    model.register_forward_pre_hook(lambda *_: take_turn(number), prepend=True)  # before FSDP's own


def layers_of(model) -> torch.nn.ModuleList:
    """The layers of a language model, whatever it calls them."""
    return next(part for part in model.get_decoder().children() if isinstance(part, torch.nn.ModuleList))


# --- the tiny model: Llama's architecture and a real HF tokenizer, built here so that nothing is downloaded
HINT = "\n\nThe solution that the human has in mind, for your eyes only:\n{hidden_information}"
TINY_PROMPT = "ask, then answer."
TINY_SINGLE_TURN_PROMPT = "answer at once."
TINY_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def backend_phrases() -> list[str]:
    """What the miniature's functions and talks are made of."""
    facts = [(name, value) for name in colbench.DETAILS for value in colbench.VALUES]
    phrases = [part for text in (colbench.REQUEST, colbench.QUESTION, HINT) for part in re.split(r"\{\w*\}", text)]
    phrases += [colbench.FACT.format(name, value) for name, value in facts]
    phrases += ["\n    " + colbench.DETAILS[name].format(value) for name, value in facts]
    phrases += [colbench.ENOUGH, colbench.UNKNOWN, colbench.GOODBYE, *colbench.THINGS, *colbench.DETAILS]
    return phrases + [TINY_PROMPT, TINY_SINGLE_TURN_PROMPT, colbench.ANSWER_MARKER + "\n", "def fee(x):", "\n    return x"]


def frontend_phrases() -> list[str]:
    """What the miniature's pages and talks are made of."""
    values = [(name, value) for name, lines in colbench.CHOICES.items() for value in lines]
    phrases = [part for text in (colbench.PAGE_REQUEST, HINT) for part in re.split(r"\{\w*\}", text)]
    phrases += [colbench.PAGE_FACT.format(name, value) for name, value in values]
    phrases += ["\n" + colbench.CHOICES[name][value] for name, value in values]
    phrases += ["<html>", "\n</main></body></html>", colbench.SATISFIED, colbench.NO_PAGE, *colbench.BUSINESSES]
    return phrases + [TINY_PROMPT, TINY_SINGLE_TURN_PROMPT, colbench.ANSWER_MARKER + "\n", colbench.OUTPUT_MARKER + "\n"]


def tiny_tokenizer(task: str = "backend"):
    """A byte-level tokenizer plus one token for each phrase of the miniature world; any other text falls back to its bytes."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"])
    core.add_tokens([AddedToken(phrase, normalized=False) for phrase in dict.fromkeys(MINIATURES[task].phrases()) if phrase])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<|pad|>", eos_token="<|end|>")
    tokenizer.chat_template = TINY_TEMPLATE
    return tokenizer


def tiny_model(tokenizer, hidden_size: int = 64, layers: int = 2):
    """About 130,000 parameters, random; grouped-query attention and tied embeddings like its larger kin."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=hidden_size, intermediate_size=3 * hidden_size, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, initializer_range=0.06, max_position_embeddings=1024,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return LlamaForCausalLM(config)


FACT_PATTERN = re.compile(r"the ([a-z ]+) is (\d+)\.")
PAGE_FACT_PATTERN = re.compile(r"the (\w+) should be ([a-z ]+)\.")


def scripted_programmer(history: list[Message], hint: str | None, rng: random.Random, at_once: bool) -> str:
    """One message of the warm-up's author, who is often lazy and sometimes off the point.

    This is the quality that the tiny model starts from, as an instruct model starts from its own.  With a hint
    it mostly asks about what is really there, without one about anything that such a thing may have.  Even where
    the human has told everything it often asks on.
    """
    facts = {name: int(value) for m in history if m["role"] == "user" for name, value in FACT_PATTERN.findall(m["content"])}
    asked = {m["content"] for m in history if m["role"] == "assistant"}
    thing = next(thing for thing in colbench.THINGS if f" {thing}." in history[0]["content"])
    possible = [name for name in colbench.THINGS[thing] if colbench.QUESTION.format(name) not in asked]
    wanted = [name for name in colbench.miniature_details(hint or "") if name not in facts]
    told_all = FACT_PATTERN.search(history[0]["content"])
    lazy = 1.0 if told_all else 0.6 if history[-1]["content"].endswith(colbench.ENOUGH) else 0.1
    if at_once or not possible or rng.random() < lazy:
        return colbench.ANSWER_MARKER + "\n" + colbench.miniature_code(facts)
    if wanted and rng.random() < 0.65:
        return colbench.QUESTION.format(rng.choice(wanted))
    return colbench.QUESTION.format(rng.choice(possible if rng.random() < 0.65 else list(colbench.DETAILS)))


def scripted_designer(history: list[Message], hint: str | None, rng: random.Random, at_once: bool) -> str:
    """One page of the warm-up's author, who forgets, fiddles with what was fine, and often stops too early or too late."""
    told = dict(pair for m in history if m["role"] == "user" for pair in PAGE_FACT_PATTERN.findall(m["content"]))
    before = colbench.miniature_choices(history[-2]["content"]) if len(history) > 1 else {}
    usual = colbench.favourites(next(b for b in colbench.BUSINESSES if f" {b}." in history[0]["content"]))
    wanted = colbench.miniature_choices(hint or "")
    page = {}
    for name, lines in colbench.CHOICES.items():
        best = wanted.get(name) if wanted and rng.random() < 0.65 else told.get(name) or before.get(name) or usual[name]
        careful = 0.5 if not before and not told else 0.85
        page[name] = best if rng.random() < careful else rng.choice(list(lines))
    told_all = at_once or PAGE_FACT_PATTERN.search(history[0]["content"])
    last = 1.0 if told_all else 0.6 if history[-1]["content"] == colbench.SATISFIED else 0.1
    marker = colbench.ANSWER_MARKER if rng.random() < last else colbench.OUTPUT_MARKER
    return marker + "\n" + colbench.miniature_page(page)


def some_details(rng: random.Random) -> list[str]:
    """One to three details of a function, told."""
    names = rng.sample(list(colbench.DETAILS), rng.randint(1, 3))
    return [colbench.FACT.format(name, rng.choice(colbench.VALUES)) for name in names]


def some_choices(rng: random.Random) -> list[str]:
    """Some or all values of a page, told."""
    names = rng.sample(list(colbench.CHOICES), rng.randint(1, len(colbench.CHOICES)))
    return [colbench.PAGE_FACT.format(name, rng.choice(list(colbench.CHOICES[name]))) for name in names]


@dataclass(frozen=True)
class Miniature:
    """What the two miniature worlds differ in, beside colbench.BENCHMARKS."""

    phrases: Callable[[], list[str]]
    author: Callable[[list[Message], str | None, random.Random, bool], str]
    some_facts: Callable[[random.Random], list[str]]
    human: Callable
    train_tasks: int
    test_tasks: int
    warm_up_tasks: int


MINIATURES = {
    "backend": Miniature(backend_phrases, scripted_programmer, some_details, ScriptedSimulator, 300, 500, 6000),
    "frontend": Miniature(frontend_phrases, scripted_designer, some_choices, ScriptedDesigner, 200, 200, 2500),
}


def warm_up_dialogue(world: Miniature, task: Task, kind: str, rng: random.Random) -> tuple[list[Message], str | None]:
    """(messages, hint) of one scripted dialogue.

    Kinds: "plain"; "hinted", by an author who has read the hint, so that the model can use one as an instruct
    model can; "told", where the request tells much, so that it learns to copy; "single", an answer at once.
    """
    hint = task.ground_truth if kind == "hinted" else None
    if kind == "told":
        task = dataclasses.replace(task, problem_description=" ".join([task.problem_description, *world.some_facts(rng)]))

    def author(histories):
        return [colbench.Action(world.author(history, hint, rng, kind == "single")) for history in histories]

    trajectory = colbench.rollout(author, world.human().reply, [task])[0]
    prompt = TINY_SINGLE_TURN_PROMPT if kind == "single" else TINY_PROMPT
    return [{"role": "system", "content": prompt}, *trajectory.dialogue], hint


# ---------------------------------------------------------------------------------------------------------
# 3. Tokens
@dataclass
class Branch:
    """The agent's turns of one dialogue, or one candidate for its next turn, as token ids.

    Turn t is scored as actions[t] after prompts[t]; an action ends with the end-of-turn token unless it was cut.
    """

    prompts: list[list[int]]
    actions: list[list[int]]
    picture: dict[str, Tensor] | None = None  # c, for a critic that sees

    def __len__(self) -> int:
        return len(self.prompts[-1]) + len(self.actions[-1])


class Encoder:
    """The one place where messages become token ids, for critic, reference, actor and baselines alike."""

    def __init__(self, tokenizer, ends: list[int]):
        self.tokenizer = tokenizer
        self.end = self.turn_end(ends)

    def turn_end(self, ends: list[int]) -> int:
        """The token that the template puts behind an assistant's message; several ids may end a generation."""
        question, word = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "word"}
        text = self.tokenizer.apply_chat_template([question, word], tokenize=False)
        tail = text_ids(self.tokenizer, text[text.rindex("word") + len("word") :])
        return next((token for token in tail if token in ends), self.tokenizer.eos_token_id)

    def prompt(self, messages: list[Message], hint: str | None = None) -> list[int]:
        """Ids of everything before the agent's next action.  `hint` is c: this is the only door it has."""
        if hint is not None:
            system, *rest = messages
            messages = [system | {"content": system["content"] + colbench.fill(HINT, hidden_information=hint)}, *rest]
        return text_ids(self.tokenizer, chat_prompt(self.tokenizer, messages))

    def action(self, message: Message) -> list[int]:
        """Ids of what the agent said, and of its having stopped, if it did."""
        ids = text_ids(self.tokenizer, message.get("output") or message["content"])
        return ids if message.get("truncated") else [*ids, self.end]

    def dialogue(self, messages: list[Message], hint: str | None = None) -> Branch:
        """All agent turns of a dialogue, each after a history of what was SEEN of the turns before."""
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        return Branch([self.prompt(messages[:i], hint) for i in turns], [self.action(messages[i]) for i in turns])

    def candidates(self, history: list[Message], actions: list[Message], hint: str | None = None) -> list[Branch]:
        """Several candidates for one turn."""
        prompt = self.prompt(history, hint)
        return [Branch([prompt], [self.action(action)]) for action in actions]


class SeeingEncoder(Encoder):
    """For a vision-language critic (Qwen2-VL and its like): c is a page, and its picture is what stands in the prompt."""

    def __init__(self, chat: SeeingChatModel, stylesheet: str | None):
        super().__init__(chat.tokenizer, chat.ends)
        self.image_processor, self.stylesheet = chat.image_processor, stylesheet
        config = chat.model.config
        ids = [config.vision_start_token_id, config.image_token_id, config.vision_end_token_id]
        self.start, self.sign, self.stop = chat.tokenizer.convert_ids_to_tokens(ids)

    def picture(self, page: str) -> dict[str, Tensor]:
        """pixel_values (patches, D) and image_grid_thw (1, 3) of a page."""
        return dict(self.image_processor(colbench.render([page], self.stylesheet), return_tensors="pt"))

    def dialogue(self, messages: list[Message], hint: str | None = None) -> Branch:
        seen = self.picture(hint or "")  # without a hint a black one
        return self.with_picture([super().dialogue(self.unsigned(messages), self.signs(seen))], seen)[0]

    def candidates(self, history: list[Message], actions: list[Message], hint: str | None = None) -> list[Branch]:
        seen = self.picture(hint or "")
        return self.with_picture(super().candidates(self.unsigned(history), self.unsigned(actions), self.signs(seen)), seen)

    def signs(self, seen: dict[str, Tensor]) -> str:
        """What stands for a picture in a text: one token for each of its vectors."""
        count = int(seen["image_grid_thw"].prod()) // self.image_processor.merge_size**2
        return self.start + self.sign * count + self.stop

    def unsigned(self, messages: list[Message]) -> list[Message]:
        """The messages without that token, which anybody may have written."""
        return [{k: v.replace(self.sign, "") if isinstance(v, str) else v for k, v in m.items()} for m in messages]

    @staticmethod
    def with_picture(branches: list[Branch], seen: dict[str, Tensor]) -> list[Branch]:
        return [dataclasses.replace(branch, picture=seen) for branch in branches]


# ---------------------------------------------------------------------------------------------------------
# 4. Log-probs: one prefix, many branches
#
# What is scored together shares most of its tokens: 16 candidates share their history, the two dialogues of a
# pair their request, the turns of one dialogue everything before them.  So the token sequences of a group are
# merged into a prefix tree, whose nodes, in order of appearance, make ONE row; each token is computed once.
#
#     history h1 h2 h3 ─┬─ a1 a2          row        h1 h2 h3 a1 a2 b1 b2 b3
#                       └─ b1 b2 b3       position    0  1  2  3  4  3  4  5     depth in the tree
#                                         b2 sees    h1 h2 h3       b1 b2        its ancestors and itself
#
# Where nothing branches, the row is the plain sequence and the mask the plain causal one.
@dataclass
class Packed:
    """B rows, each a prefix tree of at most N tokens, and the T agent tokens of each of R branches in them."""

    input_ids: Tensor  # (B, N)
    position_ids: Tensor | None  # (B, N); None: 0, 1, 2, ...
    mask: Tensor | None  # (B, 1, N, N) bool: row i may look at column j; None: plain rows, which are causal
    source: Tensor  # (R, T) which of the B * N states predicts the token
    targets: Tensor  # (R, T) the agent's token
    turn_ids: Tensor  # (R, T) the turn whose action the token belongs to; -1 is padding
    last: Tensor  # (R, T) which of the B * N nodes is the last token of that turn


def pack(groups: list[list[Branch]], device="cpu", plain: bool = False) -> Packed:
    """Merge the branches of each group into one row; branches keep their order.  `plain`: a row for every turn."""
    rows, sources, targets, turn_ids, lasts = [], [], [], [], []
    for group in groups:
        rows.append(([], [], {}))
        for branch in group:
            source, target, turns, last = [], [], [], []
            for turn, (prompt, action) in enumerate(zip(branch.prompts, branch.actions, strict=True)):
                if plain and rows[-1][0]:
                    rows.append(([], [], {}))
                path = insert(prompt + action, *rows[-1])
                source += [(len(rows) - 1, node) for node in path[len(prompt) - 1 : -1]]  # whose state predicts the next
                target += action
                turns += [turn] * len(action)
                last += [(len(rows) - 1, path[-1])] * len(action)
            sources.append(source), targets.append(target), turn_ids.append(turns), lasts.append(last)
    width = max(len(tokens) for tokens, _, _ in rows)
    arrays = () if plain else tree_masks([parents for _, parents, _ in rows], width)
    positions, mask = [torch.from_numpy(array).to(device) for array in arrays] or (None, None)
    return Packed(
        pad([tokens for tokens, _, _ in rows], 0).to(device),
        positions,
        mask,
        pad([[row * width + node for row, node in source] for source in sources], 0).to(device),
        pad(targets, 0).to(device),
        pad(turn_ids, -1).to(device),
        pad([[row * width + node for row, node in last] for last in lasts], 0).to(device),
    )


def insert(sequence: list[int], tokens: list[int], parents: list[int], children: dict) -> list[int]:
    """Walk `sequence` down the prefix tree, adding the nodes that are missing; returns its path of nodes."""
    node, path = -1, []
    for token in sequence:
        if (node, token) not in children:
            children[node, token] = len(tokens)
            tokens.append(token)
            parents.append(node)
        node = children[node, token]
        path.append(node)
    return path


def tree_masks(all_parents: list[list[int]], width: int) -> tuple[np.ndarray, np.ndarray]:
    """Depth (B, N) of each node, and who sees whom (B, 1, N, N): a node its ancestors and itself."""
    depth = np.zeros((len(all_parents), width), dtype=np.int64)
    sees = np.zeros((len(all_parents), width, width), dtype=bool)
    sees[:, range(width), range(width)] = True  # padding too, or its softmax would be over nothing
    for row, parents in enumerate(all_parents):
        for node, parent in enumerate(parents):
            if parent >= 0:
                depth[row, node] = depth[row, parent] + 1
                sees[row, node, : parent + 1] = sees[row, parent, : parent + 1]
    return depth, sees[:, None]


def pad(rows: list[list[int]], value: int) -> Tensor:
    """Rows of unequal length as one tensor (rows, longest), filled up on the right."""
    width = max(map(len, rows))
    return torch.tensor([row + [value] * (width - len(row)) for row in rows], dtype=torch.long)


LOGITS_AT_ONCE = 2**26  # float32 logits in memory at a time: 256 MB


def hidden_states(model, packed: Packed, pictures: list[dict[str, Tensor]] | None = None) -> Tensor:
    """The last hidden state of every node, (B, N, H); with a picture in each row where the model sees."""
    if pictures:
        seen = {name: torch.cat([picture[name] for picture in pictures]).to(packed.input_ids.device) for name in pictures[0]}
        kinds = (packed.input_ids == model.config.image_token_id).int()  # (B, N) 1 where the picture is
        return model.model(input_ids=packed.input_ids, mm_token_type_ids=kinds, use_cache=False, **seen).last_hidden_state
    arguments = tree_arguments(model.config, packed)
    return model.get_decoder()(input_ids=packed.input_ids, use_cache=False, **arguments).last_hidden_state


def log_probs(model, packed: Packed) -> Tensor:
    """Log-probability of each agent token, float32, (R, T); 0 where there is none.

    Logits exist for the agent's tokens only, and only for a chunk of them at a time.
    """
    config, hidden = model.config, hidden_states(model, packed)  # (B, N, H)
    real = packed.turn_ids >= 0  # (R, T)
    states = hidden.flatten(0, 1)[packed.source[real]]  # (tokens, H)
    targets = packed.targets[real]  # (tokens,)
    scale = getattr(config, "logit_scale", 1.0) / getattr(config, "logits_scaling", 1.0)  # Cohere, Granite

    def chunk_log_probs(states: Tensor, targets: Tensor) -> Tensor:
        logits = model.get_output_embeddings()(scale * states).float()  # (chunk, V), the largest thing here: not copied
        if cap := getattr(config, "final_logit_softcapping", None):  # Gemma
            logits = cap * (logits / cap).tanh()
        return logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(1)  # (chunk,)

    size = max(1, LOGITS_AT_ONCE // config.vocab_size)
    chunks = list(zip(states.split(size), targets.split(size)))
    if len(chunks) > 1 and torch.is_grad_enabled():  # the logits are computed again when their gradient is due
        values = [checkpoint(chunk_log_probs, *chunk, use_reentrant=False) for chunk in chunks]
    else:
        values = [chunk_log_probs(*chunk) for chunk in chunks]
    return torch.zeros(real.shape, device=real.device).masked_scatter(real, torch.cat(values))


def tree_arguments(config, packed: Packed) -> dict[str, Tensor]:
    """What a model has to be told of a tree; of plain rows, nothing."""
    if packed.mask is None:
        return {}
    mask = packed.mask
    if config._attn_implementation == "eager":  # which adds the mask to the scores
        mask = torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, torch.finfo(torch.float32).min)
    return {"attention_mask": mask, "position_ids": packed.position_ids}


@torch.no_grad()
def takes_trees(model) -> bool:
    """Whether a small tree gives the model the log-probs of plain rows: a recurrent one, Mamba say, reads no mask."""
    training, branches = model.training, [Branch([[1, 2, 3]], [[4, 5, 6]]), Branch([[1, 2, 3]], [[7, 8, 9]])]
    model.eval()
    plain, same = log_probs(model, pack([branches], model.device, plain=True)), False  # (2, 3)
    with contextlib.suppress(TypeError, ValueError, RuntimeError, IndexError):  # no such argument, or another shape
        near = 1e-2 if model.dtype == torch.float32 else 0.5  # what bfloat16 leaves of large logits
        same = torch.allclose(log_probs(model, pack([branches], model.device)), plain, atol=near)
    model.train(training)
    if not same:
        print(f"  {type(model).__name__} cannot take a tree's mask: each candidate is computed with its whole history")
    return same


class HeadCritic(torch.nn.Module):
    """A linear head on the mean last hidden state of [c, o_t, a_t], one value a turn: an ablation, and the paper's critic
    for frontend design, whose model sees."""

    file = "head.safetensors"  # in the model's folder

    def __init__(self, model, image_processor=None):
        super().__init__()
        self.model, self.config, self.image_processor = model, model.config, image_processor
        self.head = torch.nn.Linear(model.config.get_text_config().hidden_size, 1, device=model.device)
        torch.nn.init.zeros_(self.head.weight), torch.nn.init.zeros_(self.head.bias)
        self.takes_trees = not image_processor and takes_trees(model)  # a picture has positions of its own

    def turn_values(self, packed: Packed, pictures: list[dict[str, Tensor]] | None = None) -> Tensor:
        """Each turn's value at each of its tokens, float32, (R, T), so that a mean over them is the value; 0 elsewhere."""
        values = self.head(hidden_states(self.model, packed, pictures)).float()  # (B, N, 1)
        causal = torch.ones(values.shape[1], values.shape[1], dtype=torch.bool, device=values.device).tril()
        sees = causal if packed.mask is None else packed.mask[:, 0]  # (B, N, N), of a turn's last token [c, o_t, a_t]
        means = (sees * values.mT).sum(2) / sees.sum(-1)  # (B, N), the head's values of the means, as it is linear
        return means.flatten()[packed.last] * (packed.turn_ids >= 0)  # (R, T)

    def save_pretrained(self, folder: Path) -> None:
        self.model.save_pretrained(folder)
        if self.image_processor:
            self.image_processor.save_pretrained(folder)
        save_file(self.head.state_dict(), Path(folder) / self.file)

    @classmethod
    def load(cls, model, folder: Path, image_processor=None) -> "HeadCritic":
        critic = cls(model, image_processor)
        try:
            critic.head.load_state_dict(load_file(folder / cls.file))
        except Exception as error:
            raise no_model(str(folder / cls.file), error) from None
        return critic.eval()


# ---------------------------------------------------------------------------------------------------------
# 5. The mathematics: pure functions of log-probs
def turn_advantages(logps: Tensor, ref_logps: Tensor, turn_ids: Tensor, normalize: bool = True) -> Tensor:
    """Equation 3: mean over the L tokens of each turn of log(pi_theta / pi_ref).

    logps, ref_logps, turn_ids: (B, T); turn_ids is the turn whose action a token belongs to, -1 elsewhere.
    Returns (B, turns), 0 for a turn that is not there.  `normalize=False` leaves out the 1/L.
    """
    turns = int(turn_ids.max().clamp(min=0)) + 1 if turn_ids.numel() else 1
    member = turn_ids[:, :, None] == torch.arange(turns, device=turn_ids.device)  # (B, T, turns)
    log_ratio = (logps - ref_logps)[:, :, None] * member  # (B, T, turns)
    length = member.sum(1).clamp(min=1) if normalize else 1  # (B, turns), L
    return log_ratio.sum(1) / length  # (B, turns), eq. 3


def bradley_terry_loss(advantages_chosen: Tensor, advantages_rejected: Tensor, beta: float) -> Tensor:
    """Equation 2: per-turn advantages (B, turns) of the two dialogues in, (B,) losses out."""
    return -F.logsigmoid(beta * (advantages_chosen.sum(1) - advantages_rejected.sum(1)))  # (B,), eq. 2


def dpo_loss(
    policy_chosen: Tensor, policy_rejected: Tensor, reference_chosen: Tensor, reference_rejected: Tensor, beta: float
) -> Tensor:
    """Equation 4: summed log-probs (B,) of the actions in, (B,) losses out."""
    chosen = policy_chosen - reference_chosen  # (B,), log[pi(a+|o) / pi_ref(a+|o)]
    rejected = policy_rejected - reference_rejected  # (B,), log[pi(a-|o) / pi_ref(a-|o)]
    return -F.logsigmoid(beta * (chosen - rejected))  # (B,), eq. 4


def nll(logps: Tensor, turn_ids: Tensor) -> Tensor:
    """Negative log-likelihood, the mean over each row's agent tokens: (B, T) and (B, T) in, (B,) out."""
    real = turn_ids >= 0  # (B, T)
    return -(logps * real).sum(1) / real.sum(1).clamp(min=1)  # (B,)


# An objective maps (logps, ref_logps, turn_ids), each (rows, T), to (losses, metrics), one value an example or
# pair each.  In preference objectives the rows alternate: chosen, rejected, chosen, rejected, ...
Objective = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]


def critic_objective(beta: float, nll_weight: float, normalize: bool = True) -> Objective:
    """The paper's first stage: equations 2 and 3 on pairs of dialogues."""

    def objective(logps, ref_logps, turn_ids):
        advantages = turn_advantages(logps, ref_logps, turn_ids, normalize)  # (2P, turns)
        chosen, rejected = advantages[0::2], advantages[1::2]  # (P, turns)
        likelihood = nll(logps[0::2], turn_ids[0::2])  # (P,)
        losses = bradley_terry_loss(chosen, rejected, beta) + nll_weight * likelihood  # (P,)
        return losses, preference_metrics(chosen.sum(1), rejected.sum(1), likelihood)

    return objective


def head_objective(beta: float, success: bool) -> Objective:
    """Ablations of stage 1: values of turns in place of log-probs, no reference.

    Equation 2 on their sums or, with `success`, the cross-entropy of each turn's value as the logit of the
    dialogue's final success, which the chosen have and the rejected have not; each dialogue weighs the same.
    """

    def objective(values, zeros, turn_ids):
        losses, metrics = critic_objective(beta, 0.0)(values, zeros, turn_ids)  # (P,)
        if success:
            sign = torch.tensor([[-1.0], [1.0]], device=values.device).repeat(len(values) // 2, 1)  # (2P, 1)
            per_turn = turn_advantages(F.softplus(sign * values), zeros, turn_ids)  # (2P, turns), -log sigma(-sign * value)
            losses = per_turn.sum(1) / (turn_ids.amax(1) + 1).clamp(min=1)  # (2P,)
        del metrics["nll"]  # there are no log-probs
        return losses, metrics

    return objective


def dpo_objective(beta: float, nll_weight: float) -> Objective:
    """The paper's second stage, equation 4, where a row is one candidate; Multi-Turn DPO, where a row is a whole dialogue."""

    def objective(logps, ref_logps, turn_ids):
        policy, reference = logps.sum(1), ref_logps.sum(1)  # (2P,)
        likelihood = nll(logps[0::2], turn_ids[0::2])  # (P,)
        losses = dpo_loss(policy[0::2], policy[1::2], reference[0::2], reference[1::2], beta)  # (P,)
        ratio = policy - reference  # (2P,)
        return losses + nll_weight * likelihood, preference_metrics(ratio[0::2], ratio[1::2], likelihood)

    return objective


def preference_metrics(chosen: Tensor, rejected: Tensor, likelihood: Tensor) -> dict[str, Tensor]:
    """What to watch: (P,) each.  Both rewards may fall; the margin and the accuracy are what counts."""
    return {
        "reward_chosen": chosen,
        "reward_rejected": rejected,
        "margin": chosen - rejected,
        "accuracy": (chosen > rejected).float(),
        "nll": likelihood,
    }


def likelihood_objective(tokens_per_example: float) -> Objective:
    """Rejection Fine-Tuning: likelihood of the agent's tokens, each token with the same weight everywhere.

    Dividing by the constant mean length, not by each dialogue's own, keeps short dialogues from counting more.
    """

    def objective(logps, ref_logps, turn_ids):
        return -logps.sum(1) / tokens_per_example, {"nll": nll(logps, turn_ids)}

    return objective


# ---------------------------------------------------------------------------------------------------------
# 6. Training: one loop for the warm-up, the baselines, the critic and the actor
@dataclass
class Example:
    """What shares one packed row: an RFT dialogue, a pair of dialogues, or all pairs of candidates of a turn."""

    branches: list[Branch]
    reference: Tensor | None = None  # (branches, T) log-probs under pi_ref, computed once before training

    def longest(self) -> int:
        return max(map(len, self.branches))


def micro_batches(examples: list[Example], size: int) -> Iterable[list[Example]]:
    """Consecutive examples with at most `size` branches together (or one example)."""
    batch: list[Example] = []
    for example in examples:
        if batch and sum(len(e.branches) for e in [*batch, example]) > size:
            yield batch
            batch = []
        batch.append(example)
    if batch:
        yield batch


def fitting(examples: list[Example], max_length: int) -> list[Example]:
    """The examples that are not longer than `max_length` tokens."""
    fit = [e for e in examples if e.longest() <= max_length]
    if len(fit) < len(examples):
        print(f"  {len(examples) - len(fit)} of {len(examples)} left out: longer than --max-length {max_length}")
    if not fit:
        raise InputError(f"--max-length {max_length}: nothing to train on, every dialogue is longer")
    return fit


CHECKPOINT_SECONDS = 20  # between two checkpoints of a training run, longer where one takes long to write


class Checkpoint:
    """Where a training run stands, in one safetensors file: weights, optimizer, metrics of the steps so far.

    A step's batch, learning rate and seed follow from its number, so that is all it takes to go on as if nothing
    had been.  `shape` stands for the settings; a checkpoint of others is not used.
    """

    def __init__(self, path: Path, shape: str):
        self.path, self.shape, self.due = path, shape, time.monotonic() + CHECKPOINT_SECONDS

    def save(self, model, optimizer, history: list[dict]) -> None:
        """Write one, if it is time."""
        start = time.monotonic()
        if start < self.due:
            return
        tensors = {f"weight {name}": p.detach() for name, p in model.named_parameters() if p.requires_grad}
        for i, state in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer {i} {key}": value for key, value in state.items()}
        with colbench.whole(self.path) as aside:
            save_file(tensors, aside, {"shape": self.shape, "history": json.dumps(history)})
        self.due = time.monotonic() + max(CHECKPOINT_SECONDS, 20 * (time.monotonic() - start))

    @torch.no_grad()
    def load(self, model, optimizer) -> list[dict]:
        """Put the model and the optimizer where they stood; returns the metrics of the steps before, [] without a checkpoint."""
        if not self.path.exists():
            return []
        parameters, states = dict(model.named_parameters()), {}
        try:
            with safe_open(self.path, "pt") as file:
                if file.metadata()["shape"] != self.shape:
                    return []
                for key in file.keys():
                    kind, name, *what = key.split(" ")
                    if kind == "weight":
                        parameters[name].copy_(file.get_tensor(key))
                    else:
                        states.setdefault(int(name), {})[what[0]] = file.get_tensor(key)
                optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})
                return json.loads(file.metadata()["history"])
        except Exception as error:  # not written by us: safetensors, torch and python have each their own words for it
            raise InputError(f"{self.path}: expected a checkpoint ({str(error)[:200]}); delete it to train anew") from None


class Trainer:
    """Optimises a model on examples; holds what is the same for every training run of a program."""

    def __init__(self, settings: Settings, device: torch.device, dtype: torch.dtype):
        self.settings, self.device, self.dtype = settings, device, dtype

    def autocast(self):
        """Compute in --precision; trained weights, log-probs and losses stay float32."""
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.dtype, cache_enabled=False)  # or it keeps a copy of all weights

    def log_probs(self, model, examples: list[Example]) -> tuple[Tensor, Tensor]:
        """(log-probs, turn_ids) of all branches of the examples, (R, T) each; of a head critic, the turns' values."""
        if not hasattr(model, "takes_trees"):  # asked once
            model.takes_trees = takes_trees(model)
        groups = [e.branches for e in examples]
        packed = pack(groups, self.device, plain=not model.takes_trees)
        width, window = packed.input_ids.shape[1], getattr(model.config, "sliding_window", None) or math.inf
        if model.takes_trees and width > window:
            print(f"  a row of {width} tokens, and the model looks back {window}: from now on a history is computed for each")
            model.takes_trees, packed = False, pack(groups, self.device, plain=True)
        with self.autocast():
            if isinstance(model, HeadCritic):
                seen = [b.picture for branches in groups for b in branches for _ in b.prompts if b.picture]  # one a row
                found = model.turn_values(packed, seen)
            else:
                found = model.log_probs(packed) if hasattr(model, "log_probs") else log_probs(model, packed)
        return found, packed.turn_ids

    @torch.no_grad()
    def add_reference(self, model, examples: list[Example], name: str) -> None:
        """Log-probs under pi_ref, once and for all: no second model is in memory while training."""
        mine = examples[RANK::RANKS]
        for batch in tqdm(list(micro_batches(mine, self.settings.micro_batch)), f"  {name}: reference", leave=False):
            logps, _ = self.log_probs(model, batch)
            rows = iter(logps.cpu())
            for example in batch:
                example.reference = torch.stack([next(rows) for _ in example.branches])  # (branches, T of the batch)
        for rank, references in enumerate(gathered([example.reference for example in mine])):
            for example, reference in zip(examples[rank::RANKS], references, strict=True):
                example.reference = reference

    def train(
        self, model, examples: list[Example], objective: Objective, name: str, lr, epochs, batch_size, checkpoint=None
    ) -> list[dict]:
        """AdamW with warm-up over 3 % of the steps and a cosine to a tenth.  Returns a dict of metrics a step.

        `batch_size` counts losses: examples, or pairs where an example holds pairs.  With a checkpoint it goes on there, in one
        process; of several, each has a share of every batch, and none keeps checkpoints.
        """
        checkpoint = checkpoint if RANKS == 1 else None
        rng = random.Random(f"{self.settings.seed} {name}")
        batches = []
        for _ in range(epochs):
            order = rng.sample(examples, len(examples))
            per_loss = max(1, round(batch_size / self.losses_in(examples)))
            batches += [order[i : i + per_loss] for i in range(0, len(order), per_loss)]
        weights = [weight for weight in model.parameters() if weight.requires_grad]  # with --lora the adapters only
        fused = self.device.type == "cuda"  # the default there makes copies of all weights
        optimizer = torch.optim.AdamW(weights, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=fused)
        history = checkpoint.load(model, optimizer) if checkpoint else []
        if history:
            print(f"  {name}: goes on behind step {len(history)} of {len(batches)}")
        model.train()
        for step, batch in enumerate(progress := tqdm(batches[len(history) :], f"  {name}", leave=False), len(history) + 1):
            torch.manual_seed(seed_of(self.settings.seed, name, step))  # for dropout, where a model has it
            optimizer.param_groups[0]["lr"] = rate = lr * warm_cosine(step - 1, len(batches))
            metrics = self.accumulate(model, batch, objective)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            norm = norm.full_tensor() if RANKS > 1 else norm
            optimizer.step(), optimizer.zero_grad()
            history.append({"run": name, "step": step} | metrics | {"grad_norm": norm.item(), "lr": rate})
            progress.set_postfix(loss=f"{metrics['loss']:.3f}", refresh=False)
            if checkpoint:
                checkpoint.save(model, optimizer, history)
        model.eval()
        return history

    @staticmethod
    def losses_in(examples: list[Example]) -> float:
        """Mean number of losses an example: 1 for a dialogue or a pair, up to 4 for the pairs of a turn."""
        branches = sum(len(e.branches) for e in examples) / len(examples)
        return branches / 2 if branches > 1 else 1

    def accumulate(self, model, batch: list[Example], objective: Objective) -> dict[str, float]:
        """Gradients of the mean loss of a batch, computed in micro-batches; returns the means of its metrics.

        Every process takes part in as many passes as the one with the most, or the others would wait for it forever.
        """
        parts: list[dict[str, Tensor]] = []
        branches = sum(len(e.branches) for e in batch)
        shares = [micro_batches(batch[rank::RANKS], self.settings.micro_batch) for rank in range(RANKS)]
        for turn in itertools.zip_longest(*shares):
            micro, counts = turn[RANK] or batch[:1], turn[RANK] is not None  # one that has none left adds a loss of 0
            logps, turn_ids = self.log_probs(model, micro)  # (R, T)
            losses, metrics = objective(logps, stack_reference(micro, logps), turn_ids)  # (losses,)
            losses_per_branch = len(losses) / len(turn_ids)  # 1, or one half where losses are of pairs
            scale = RANKS * counts  # FSDP takes the mean over the processes
            (scale * losses.sum() / (branches * losses_per_branch)).backward()
            if counts:
                parts.append({"loss": losses.detach()} | {key: value.detach() for key, value in metrics.items()})
        values = [{key: torch.cat([part[key] for part in parts]).cpu() for key in parts[0]} if parts else {}]
        parts = [part for (part,) in gathered(values) if part]
        return {key: torch.cat([part[key] for part in parts]).mean().item() for key in parts[0]}


def stack_reference(examples: list[Example], like: Tensor) -> Tensor:
    """The stored reference log-probs of the examples, padded or cut to the shape of `like`, (R, T)."""
    out = torch.zeros_like(like, requires_grad=False)  # (R, T)
    rows = [row for e in examples if e.reference is not None for row in e.reference]
    for i, row in enumerate(rows):
        width = min(len(row), out.shape[1])  # beyond it there is padding only
        out[i, :width] = row[:width]
    return out


def warm_cosine(step: int, steps: int) -> float:
    """Learning-rate factor: linear from 0 to 1 over the first 3 % of the steps, a cosine down to 0.1 after."""
    warm = max(1, round(0.03 * steps))
    if step < warm:
        return (step + 1) / warm
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


# ---------------------------------------------------------------------------------------------------------
# 7. The run: which file is made from what, and what is there already
MODEL_SETTINGS = ("task", "model", "seed")
AGENT_SETTINGS = ("agent", "agent_model")
ROLLOUT_SETTINGS = ("max_turns", "max_new_tokens", "agent_prompt", "embedding", "stylesheet")
PRODUCTS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {  # name: stage, settings, what it is made from
    "base": ("collect", MODEL_SETTINGS, ()),
    "trajectories.jsonl": (
        "collect",
        (
            *("trajectories", "train_tasks", "num_tasks", "dialogues", "simulator", "human_prompt"),
            *(*AGENT_SETTINGS, *ROLLOUT_SETTINGS),
        ),
        ("base",),
    ),
    "trajectory_pairs.jsonl": ("pairs", (), ("trajectories.jsonl",)),
    "critic": (
        "critic",
        (
            *("critic", "critic_model", "no_hint", "no_normalize", "critic_beta", "critic_nll", "critic_lr", "critic_epochs"),
            *("batch_size", "max_length", "lora"),
        ),
        ("base", "trajectory_pairs.jsonl"),
    ),
    "candidates.jsonl": (
        "candidates",
        ("candidates", "turn_fraction", "max_new_tokens", *AGENT_SETTINGS),
        ("base", "trajectories.jsonl", "critic"),
    ),
    "turn_pairs.jsonl": ("turn-pairs", ("pairs_per_turn",), ("candidates.jsonl",)),
    "actor": (
        "actor",
        ("actor_beta", "actor_nll", "actor_lr", "actor_epochs", "batch_size", "max_length", "lora"),
        ("base", "turn_pairs.jsonl"),
    ),
    "rft": ("actor", ("rft_lr", "rft_epochs", "rft_batch_size", "max_length", "lora"), ("base", "trajectories.jsonl")),
    "mt-dpo": (
        "actor",
        ("mt_dpo_beta", "mt_dpo_nll", "mt_dpo_lr", "mt_dpo_epochs", "batch_size", "max_length", "lora"),
        ("base", "trajectory_pairs.jsonl"),
    ),
}
AGENTS = {"single-turn": "base", "zero-shot": "base", "rft": "rft", "mt-dpo": "mt-dpo", "sweet": "actor"}
EVAL_SETTINGS = ("tasks", "num_tasks", "simulator", "human_prompt", *ROLLOUT_SETTINGS)
for method, agent in AGENTS.items():
    names = EVAL_SETTINGS + AGENT_SETTINGS * (agent == "base")
    PRODUCTS[f"eval_{method}.jsonl"] = ("evaluate", (*names, "best_of"), (agent,))
    PRODUCTS[f"eval_{method}_greedy.jsonl"] = ("evaluate", names, (agent,))


def inputs_of(product: str, s: Settings) -> tuple[str, ...]:
    """What a product is made from; best-of-N needs the critic as well."""
    _, names, inputs = PRODUCTS[product]
    return (*inputs, "critic") if s.best_of and "best_of" in names else inputs


def seed_of(*parts) -> int:
    """A seed from anything printable, the same on every machine."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "big")


def file_digest(path: Path) -> str:
    """What tells one content of a file, or of the weights in a folder, from another."""
    digest = hashlib.sha256()
    for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
        with open(file, "rb") as data:
            while block := data.read(2**20):  # weights may be larger than memory
                digest.update(block)
    return digest.hexdigest()[:16]


class Run:
    """The folder of a run.  settings.json says which settings shaped each file in it.

    A file without a record was put there by hand, and is used as it is.  One with a record of other upstream
    settings is refused, never overwritten.
    """

    def __init__(self, settings: Settings):
        self.settings, self.out = settings, Path(settings.out)
        self.digest = functools.cache(file_digest)  # a file of the user's stays as it is while a run lasts
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            self.lock = open(self.out / ".lock", "w")  # held until this object or the process is gone, however it ends
            if RANK == 0:
                fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"--out {self.out}: another run is at work in this folder") from None
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOTSUP):  # a file system without locks
                raise InputError(f"--out {self.out}: cannot be made or written to ({error.strerror})") from None
        self.records: dict[str, dict] = self.read_json(self.out / "settings.json", {...: dict})
        self.seconds: dict[str, float] = self.read_json(self.out / "timings.json", {...: float})

    @staticmethod
    def read_json(path: Path, shape: dict) -> dict:
        """The object in a JSON file, empty where there is no file."""
        try:
            value = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(f"{path}: expected a JSON object ({error})") from None
        colbench.check_shape(value, shape, str(path))
        return value

    def write_json(self, name: str, value: dict) -> None:
        """An object as a file of the run; of several processes the first writes."""
        if RANK == 0:
            colbench.write_whole(self.path(name), json.dumps(value, indent=1).encode())

    @staticmethod
    def write_jsonl(path: Path, rows: list[dict]) -> None:
        """Rows as a file of the run; of several processes the first writes."""
        if RANK == 0:
            colbench.write_jsonl(path, rows)

    def path(self, product: str) -> Path:
        return self.out / product

    def shape(self, product: str) -> dict:
        """Every setting upstream of a product, with the digest of each file that the user gave or put there by hand."""
        path = self.path(product)
        if path.exists() and product not in self.records:
            return {product: f"by hand {self.digest(path)}", "task": self.settings.task, "seed": self.settings.seed}
        shape = {name: getattr(self.settings, name) for name in PRODUCTS[product][1]}
        for name, value in shape.items():
            if isinstance(value, str) and os.path.isfile(value):  # what is in it shapes the product, not its name alone
                shape[name] = f"{value} {self.digest(Path(value))}"
        for other in inputs_of(product, self.settings):
            shape |= self.shape(other)
        return shape

    def check(self, product: str) -> bool:
        """Whether the product is there already; InputError if other settings made it."""
        if not self.path(product).exists():
            return False
        if product in self.records:
            shape, record = self.shape(product), self.records[product]
            changed = sorted(key for key in shape.keys() | record.keys() if shape.get(key) != record.get(key))
            if changed:
                was = ", ".join(f"{key} was {record.get(key)}, is {shape.get(key)}" for key in changed)
                raise InputError(f"{self.path(product)} was made with other settings ({was}): use another --out")
        return True

    def make(self, product: str, build: Callable[[Path], None]) -> None:
        """`build(path)` the product and record what shaped it, unless it is there already."""
        if self.check(product):
            where = "" if product in self.records else ", put there by hand"
            print(f"  {product}: there already{where}, not made again")
            self.checkpoint(product).path.unlink(missing_ok=True)  # of a run that was killed right behind it
            return
        for other in inputs_of(product, self.settings):
            if not self.path(other).exists() and not (other == "base" and not self.settings.is_tiny):
                raise InputError(f"{self.path(other)} is missing: run stage {PRODUCTS[other][0]} first (--stages)")
            self.check(other)
        self.records[product] = self.shape(product)
        self.write_json("settings.json", self.records)  # first: what a kill leaves behind is never taken for put there by hand
        try:
            gathered(None)  # nothing appears before every process has looked
            build(self.path(product))
            gathered(None)
            gc.collect()  # a sharded model refers to itself
        finally:
            if not self.path(product).exists():
                del self.records[product]
                self.write_json("settings.json", self.records)
        self.checkpoint(product).path.unlink(missing_ok=True)

    def shape_digest(self, product: str) -> str:
        """What tells a half-made product from one of other settings."""
        return hashlib.sha256(json.dumps(self.shape(product), sort_keys=True).encode()).hexdigest()[:8]

    def checkpoint(self, product: str) -> Checkpoint:
        """Where the training of a product stands, if it was interrupted."""
        return Checkpoint(self.path(f"{product}.checkpoint"), self.shape_digest(product))

    def rows_by_batch(self, path: Path, items: list, size: int, make_rows: Callable[[list], list]) -> None:
        """Write one row per item, or an empty line for None, to a JSONL file, a batch at a time, each from a seed of its own.

        After an interruption the finished batches are kept, and the open one is played again from its seed.
        """
        part = path.with_name(f"{path.name}.{self.shape_digest(path.name)}.part")
        done = part.read_bytes().split(b"\n")[:-1] if part.exists() else []
        done = done[: len(done) // size * size]
        if RANK == 0:
            with colbench.writing(part), open(part, "ab") as file:
                file.truncate(sum(len(line) + 1 for line in done))
        for start in tqdm(range(len(done), len(items), size * RANKS), f"  {path.name}", leave=False):
            start += size * RANK  # each process plays one of the next batches
            torch.manual_seed(seed_of(self.settings.seed, path.name, start))
            rows = itertools.chain(*gathered(make_rows(items[start : start + size]) if start < len(items) else []))
            if RANK == 0:
                with colbench.writing(part), open(part, "ab") as file:
                    file.writelines(b"\n" if row is None else colbench.json_line(row) for row in rows)
        if RANK == 0:
            os.replace(part, path)
        gathered(None)

    def log(self, history: list[dict]) -> None:
        """Add the metrics of a training run to metrics.jsonl, in place of an earlier try's."""
        names = {row["run"] for row in history}
        self.write_jsonl(self.path("metrics.jsonl"), [row for row in self.metrics() if row["run"] not in names] + history)

    def metrics(self) -> list[dict]:
        """The rows of metrics.jsonl; a damaged file costs its curves, never a model."""
        path = self.path("metrics.jsonl")
        try:
            return colbench.read_jsonl(path, {"run": str, "step": float, ...: (float,)}) if path.exists() else []
        except InputError as error:
            print(f"  {error}: its curves are left out")
            return []

    @contextlib.contextmanager
    def timed(self, stage: str):
        """Print and keep the seconds that a stage took."""
        print(f"[{stage}]", flush=True)
        start = time.time()
        yield
        self.seconds[stage] = round(time.time() - start, 1)
        print(f"  {self.seconds[stage]} s", flush=True)
        self.write_json("timings.json", self.seconds)


def save_model(model, tokenizer, path: Path) -> None:
    """A model folder that `from_pretrained` and vLLM load; it appears whole or not at all."""
    state = {}
    if RANKS > 1:  # gathered from all processes by the first
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)  # with --lora the base
        whole = get_model_state_dict(model, options=options)
        state = {"state_dict": {name: value for name, value in whole.items() if name not in model.all_tied_weights_keys}}
    if RANK > 0:
        return
    with colbench.whole(path) as aside:
        shutil.rmtree(aside, ignore_errors=True)
        model.save_pretrained(aside, **state)
        tokenizer.save_pretrained(aside)


# ---------------------------------------------------------------------------------------------------------
# 8. The seven stages
class Sweet:
    """The stages of a run, in the order of the paper; each reads its files and makes its own."""

    def __init__(self, settings: Settings, machine: tuple[torch.device, torch.dtype] | None = None):
        self.settings, self.run = settings, Run(settings)
        self.device, self.dtype = machine or pick_device(settings)
        self.trainer = Trainer(settings, self.device, self.dtype)
        self.benchmark, self.miniature = colbench.BENCHMARKS[settings.task], MINIATURES[settings.task]
        tiny = settings.is_tiny
        if tiny:
            torch.set_num_threads(1)  # on a model this small a second thread only waits
        self.system = prompt_file(settings.agent_prompt, TINY_PROMPT if tiny else self.benchmark.agent_prompt)
        self.single_turn_system = TINY_SINGLE_TURN_PROMPT if tiny else self.benchmark.single_turn_prompt
        self.human_prompt = prompt_file(settings.human_prompt, self.benchmark.human_prompt)

    # --- what the stages share
    def model(self, product: str, train: bool = False):
        """(model, tokenizer, encoder) of a product; "base" is the untouched --model or the warmed-up tiny one.

        To be trained it is in float32, or with --lora under new adapters, and all but the tiny one compute their
        activations again when their gradient is due; else it is frozen, in the compute precision.
        """
        s, path, adapter = self.settings, self.run.path(product), None
        if s.lora and (path / "adapter_config.json").exists():
            product, adapter = "base", path
        if s.lora and train:
            adapter = s.lora
            torch.manual_seed(seed_of(s.seed, "lora"))
        model, tokenizer = self.load(self.folder(product), train, adapter)
        if train and not s.is_tiny:
            recompute_activations(model)
        encoder = Encoder(tokenizer, end_ids(model, tokenizer))
        if (path / HeadCritic.file).exists():
            model = HeadCritic.load(model, path)
        return model, tokenizer, encoder

    def critic_model(self, train: bool = False):
        """(model, tokenizer, encoder) of the critic, or of what it starts from."""
        s, path = self.settings, self.run.path("critic")
        if not s.critic_model:
            return self.model("base", train=True) if train else self.model("critic")
        name, dtype = (s.critic_model, torch.float32) if train else (str(path), self.dtype)
        model, tokenizer = load_model(name, self.device, dtype, sees=True)
        encoder = SeeingEncoder(SeeingChatModel(model, tokenizer), s.stylesheet)
        if train:
            recompute_activations(model)
        else:
            model = HeadCritic.load(model, path, encoder.image_processor)
        return model, tokenizer, encoder

    def folder(self, product: str) -> str:
        """Where a product's model is: the base of a named model is where its name says."""
        s = self.settings
        return s.model if product == "base" and not s.is_tiny else str(self.run.path(product))

    def load(self, name: str, train: bool = False, adapter: int | Path | None = None) -> tuple:
        """(model, tokenizer): float32 to be trained, frozen in the compute precision, as under adapters; sharded if need be."""
        dtype = torch.float32 if train and not adapter else self.dtype
        if RANKS > 1 and (train or self.settings.shard):
            return load_sharded(name, self.device, dtype, self.dtype, adapter)
        one_for_all = self.settings.lora and name == self.folder("base")
        model, tokenizer = self.frozen_base if one_for_all else load_model(name, self.device, dtype)
        return adapted(model, adapter) if adapter else model, tokenizer

    @functools.cached_property
    def frozen_base(self) -> tuple:
        """(model, tokenizer) of the base, loaded once for all adapters."""
        return load_model(self.folder("base"), self.device, self.dtype)

    def hint(self, ground_truth: str) -> str | None:
        """c as the critic reads it: not at all with --no-hint."""
        return None if self.settings.no_hint else ground_truth

    def agent(self, model, tokenizer, temperature=1.0, system=None) -> ChatModel | ServerAgent:
        """The agent that a model plays; without one, --agent's server."""
        s = self.settings
        if model is None:
            return ServerAgent(self.agent_server, system or self.system, temperature, s.max_new_tokens)
        return ChatModel(model, tokenizer, system or self.system, temperature, s.max_new_tokens, s.generate_batch)

    def players(self, product: str, temperature=1.0, system=None) -> tuple:
        """(agent, human) of a dialogue: a product's model, with --agent the server for the base, and its human."""
        served = product == "base" and self.settings.agent
        model, tokenizer, _ = (None, None, None) if served else self.model(product)
        return self.agent(model, tokenizer, temperature, system), self.human(product, model, tokenizer)

    @functools.cached_property
    def agent_server(self) -> ChatServer:
        """The server that plays the agent, asked here for the first time: for a whole message, as it will be."""
        s = self.settings
        server = ChatServer(s.agent, s.agent_model)
        (action,) = ServerAgent(server, self.system, 1.0, s.max_new_tokens)([[{"role": "user", "content": "hi"}]])
        if isinstance(action.text, Failure):
            raise InputError(f"--agent: {action.text}")
        return server

    @functools.cached_property
    def server(self) -> ChatServer | None:
        """The server that plays the human, None where --simulator is no URL."""
        s = self.settings
        return ChatServer(s.simulator, s.server_model) if s.simulator.startswith(("http://", "https://")) else None

    def human(self, agent_product: str, model, tokenizer):
        """The human that --simulator names; `model` is at hand and serves if it is the untouched one."""
        s = self.settings
        if s.simulator in ("scripted", "tiny"):
            return self.miniature.human()
        if s.simulator == "keyboard":
            return KeyboardSimulator()
        pictures = functools.partial(page_pictures, stylesheet=s.stylesheet) if s.task == "frontend" else None
        if self.server:
            return ServerSimulator(self.server, self.human_prompt, pictures)
        if pictures:
            model, tokenizer = load_model(s.simulator, self.device, self.dtype, sees=True)
        elif s.simulator != s.model:
            model, tokenizer = self.load(s.simulator)
        elif agent_product != "base" or model is None:
            model, tokenizer, _ = self.model("base")
        return LLMSimulator(model, tokenizer, self.human_prompt, s.generate_batch, pictures)

    def with_system(self, messages: list[Message]) -> list[Message]:
        """A dialogue as training files hold it: the agent's system prompt in front."""
        kept = ("role", "content", "output", "truncated")
        messages = [{key: m[key] for key in kept if key in m} for m in messages]
        return [{"role": "system", "content": self.system}, *messages]

    def rewards(self, tasks: list[Task], answers: list[str]) -> list[float]:
        """Fractions of unit tests, or similarities of pictures."""
        if self.settings.task == "backend":
            return colbench.unit_test_rewards(tasks, answers)
        return colbench.cosine_rewards(tasks, answers, self.embed, self.settings.stylesheet)

    @functools.cached_property
    def embed(self) -> Callable:
        """What turns pictures into vectors whose cosine is the frontend's reward."""
        name = self.settings.embedding
        return colbench.pixel_embedding if name == "pixels" else colbench.clip_embedding(name, self.device)

    def trajectories(self, source) -> list[Trajectory]:
        """The trajectories of a file of this run, or of the user's."""
        return colbench.load_trajectories(source, self.benchmark.task_fields)

    def rewarded_rows(self, trajectories: list[Trajectory]) -> list[dict]:
        """Official rows; a missing reward is computed.  A task whose reference cannot run keeps none."""
        bare = [t for t in trajectories if t.reward is None and not t.failed]
        rewards = self.rewards([t.task for t in bare], [t.answer for t in bare])
        for trajectory, reward in zip(bare, rewards):
            trajectory.reward = None if math.isnan(reward) else float(reward)
        return [colbench.trajectory_row(t) for t in trajectories]

    def play(self, path: Path, tasks: list[Task], agent, human, max_turns: int, choose=None) -> None:
        """Play a dialogue per task, in batches, into a trajectories file."""

        def rows(batch: list[Task]) -> list[dict]:
            how = (max_turns, self.benchmark.find_answer, self.benchmark.reply_limit, choose)
            played = colbench.rollout(agent, human.reply, batch, *how)
            if len(played) > 1 and all(t.failed for t in played):
                raise InputError(f"{path}: every dialogue of a batch has failed: {played[0].failed}")
            return self.rewarded_rows(played)

        self.run.rows_by_batch(path, tasks, self.settings.generate_batch, rows)

    # --- stage 0: a model to start from
    def warm_up(self, path: Path) -> None:
        """Train the tiny model on scripted dialogues of mixed quality until it stands in for an instruct model."""
        s = self.settings
        torch.manual_seed(seed_of(s.seed, "tiny"))
        world = self.miniature
        tokenizer = tiny_tokenizer(s.task)
        model = tiny_model(tokenizer).to(self.device)
        if RANKS > 1:
            whole, model = model, copy.deepcopy(model).to("meta")
            shard(whole, model, self.device, self.dtype)
        encoder = Encoder(tokenizer, end_ids(model, tokenizer))
        tasks = self.benchmark.miniature_tasks("train", world.train_tasks + world.warm_up_tasks, s.seed)[world.train_tasks :]
        rng = random.Random(s.seed)
        kinds = itertools.cycle(WARM_UP_KINDS)
        dialogues = [warm_up_dialogue(world, task, kind, rng) for task, kind in zip(tasks, kinds)]
        examples = [Example([encoder.dialogue(messages, hint)]) for messages, hint in dialogues]
        objective = likelihood_objective(mean_tokens(examples))
        at = self.run.checkpoint(path.name)
        self.run.log(self.trainer.train(model, examples, objective, "warm-up", 3e-3, WARM_UP_EPOCHS, 64, at))
        save_model(model, tokenizer, path)

    # --- stage 1
    def collect(self, path: Path) -> None:
        """Offline dialogues: k blocks of one dialogue per task, or someone's file."""
        s = self.settings
        if s.trajectories:
            trajectories = first_tasks(self.trajectories(s.trajectories), s.num_tasks)
            self.run.write_jsonl(path, self.rewarded_rows(trajectories))
            return
        tasks = self.tasks("train")
        self.play(path, tasks * s.dialogues, *self.players("base"), s.max_turns)

    def tasks(self, split: str) -> list[Task]:
        """Training or test tasks: generated ones, or the user's."""
        s = self.settings
        source = s.train_tasks if split == "train" else s.tasks
        if source:
            paper = 1000 if source == colbench.HUB_DATASET else None  # the paper's test tasks are the first 1,000
            return colbench.load_tasks(source, self.benchmark.task_fields)[: s.num_tasks or paper]
        count = s.num_tasks or (self.miniature.train_tasks if split == "train" else self.miniature.test_tasks)
        return self.benchmark.miniature_tasks(split, count, s.seed)

    def check_inputs(self) -> None:
        """Read the user's files, ask the user's server and browser before anything is trained: a fault is to show now."""
        s, stages = self.settings, self.settings.stages.split(",")
        if s.human_model not in (None, s.model):  # --model has been read for the plan
            read_config(s.human_model)
        if {"collect", "evaluate"} & set(stages):
            self.server  # asked here for the first time
            if s.task == "frontend":
                self.embed(colbench.render(["<html></html>"], s.stylesheet))
                if s.stylesheet:
                    colbench.stylesheet_text(s.stylesheet)
                if s.against:
                    self.trajectories(s.against)
        given = {"trajectories.jsonl"} if s.trajectories else set()
        played = {name for name in wanted_products(s) if "agent" in PRODUCTS[name][1]} - given
        if s.agent and not all(self.run.path(name).exists() for name in played):
            self.agent_server  # likewise
        if s.tasks and "evaluate" in stages:
            self.tasks("test")
        if s.trajectories and "collect" in stages:
            self.trajectories(s.trajectories)
        elif s.train_tasks and "collect" in stages:
            self.tasks("train")

    # --- stage 2
    def pairs(self, path: Path) -> None:
        """Better against worse dialogue of a task: which two make a pair is the benchmark's."""
        groups = task_groups(self.trajectories(self.run.path("trajectories.jsonl")))
        if not groups:
            raise InputError(f"{self.run.path('trajectories.jsonl')}: no dialogue has a reward: of no task does the reference run")
        pairs = [[(group[i], group[j]) for i, j in self.benchmark.preferred([t.reward for t in group])] for group in groups]
        rows = [
            {
                "chosen": self.with_system(better.dialogue),
                "rejected": self.with_system(worse.dialogue),
                "ground_truth": better.task.ground_truth,
            }
            for better, worse in itertools.chain.from_iterable(pairs)
        ]
        if not rows:
            raise InputError(
                f"{self.run.path('trajectories.jsonl')}: no task has one dialogue that is good enough and one that is worse, so "
                "there is no pair to learn from: collect more (--dialogues, --num-tasks) or use a stronger model"
            )
        print(f"  {len(rows)} pairs on {sum(map(bool, pairs))} tasks")
        self.run.write_jsonl(path, rows)

    # --- stage 3
    def critic(self, path: Path) -> None:
        """Equations 2 and 3: agent and frozen reference both read c in front of the dialogue."""
        s = self.settings
        head = s.critic != "logprob"
        objective = critic_objective(s.critic_beta, s.critic_nll, not s.no_normalize)
        if head:
            objective = head_objective(s.critic_beta, s.critic == "value")
        self.train_on_pairs(path, "trajectory_pairs.jsonl", objective, not s.no_hint, s.critic_lr, s.critic_epochs, head)

    def train_on_pairs(self, path: Path, file: str, objective: Objective, hint: bool, lr, epochs, head=False) -> None:
        """Train a copy of the base on a file of dialogue pairs, with or without c, with or without a head."""
        model, tokenizer, encoder = self.critic_model(train=True) if head else self.model("base", train=True)
        shape = DIALOGUE_PAIR | ({"ground_truth": str} if hint else {})
        examples = [
            Example([encoder.dialogue(row[side], row["ground_truth"] if hint else None) for side in ("chosen", "rejected")])
            for row in colbench.read_jsonl(self.run.path(file), shape, check_lists)
        ]
        model = HeadCritic(model, getattr(encoder, "image_processor", None)) if head else model
        self.fit(path, model, tokenizer, examples, objective, lr, epochs, self.settings.batch_size, reference=not head)

    def fit(self, path, model, tokenizer, examples, objective, lr, epochs, batch_size, reference: bool) -> None:
        """Reference log-probs first, then training, then the folder."""
        examples = fitting(examples, self.settings.max_length)
        if reference:
            self.trainer.add_reference(model, examples, path.name)
        at = self.run.checkpoint(path.name)
        history = self.trainer.train(model, examples, objective, path.name, lr, epochs, batch_size, at)
        self.run.log(history)
        print(f"  {path.name}: {len(examples)} examples, {len(history)} steps, {metrics_line(history)}")
        save_model(model, tokenizer, path)

    # --- stage 4
    def candidates(self, path: Path) -> None:
        """For each turn of the first dialogues: 16 messages from the agent, without c, scored by the critic, with c."""
        s = self.settings
        trajectories = [t for t in self.trajectories(self.run.path("trajectories.jsonl")) if not t.failed]
        trajectories = trajectories[: math.ceil(s.turn_fraction * len(trajectories))]
        turns = [(t.task, turn.history) for t in trajectories for turn in t.turns]
        (model, tokenizer, _), (critic, _, encoder) = self.model("base"), self.critic_model()
        agent = self.agent(None if s.agent else model, tokenizer)

        def rows(batch) -> list[dict | None]:
            tasks, histories = zip(*batch)
            rows = self.scored_rows(critic, model, encoder, tasks, histories, agent.sample(histories, s.candidates))
            kept = [None if isinstance(row["candidates"][0], Failure) else row for row in rows]
            if len(rows) > 1 and not any(kept):
                raise InputError(f"{path}: no turn of a batch got candidates: {rows[0]['candidates'][0]}")
            return kept

        self.run.rows_by_batch(path, turns, s.generate_batch if s.agent else max(1, s.generate_batch // s.candidates), rows)
        if left_out := path.read_bytes().split(b"\n")[:-1].count(b""):
            print(f"  {left_out} of {len(turns)} turns left out: the server gave no candidates")

    def scored_rows(self, critic, reference, encoder: Encoder, tasks, histories, candidates) -> list[dict]:
        """The candidates of each turn, a list of actions, with their advantages."""
        rows = [
            {
                "messages": self.with_system(history),
                "candidates": [a.text for a in actions],
                "truncated": [a.truncated for a in actions],
                "ground_truth": task.ground_truth,
            }
            for task, history, actions in zip(tasks, histories, candidates)
        ]
        scores = self.score(critic, reference, encoder, rows)
        return [row | {"advantages": advantages} for row, advantages in zip(rows, scores)]

    def chooser(self) -> colbench.Chooser:
        """Best-of-N: of a turn's candidates the one that the critic ranks first."""
        reference, (critic, _, encoder) = self.model("base")[0], self.critic_model()

        def choose(tasks, histories, candidates):
            scores = [row["advantages"] for row in self.scored_rows(critic, reference, encoder, tasks, histories, candidates)]
            return [actions[advantages.index(max(advantages))] for actions, advantages in zip(candidates, scores)]

        return choose

    def score(self, critic, reference, encoder: Encoder, rows: list[dict]) -> list[list[float]]:
        """The advantage of every candidate of every row."""
        examples = [
            Example(encoder.candidates(row["messages"], candidate_messages(row), self.hint(row["ground_truth"])))
            for row in rows
        ]
        return [[turns[0] for turns in branches] for branches in self.advantages(critic, reference, examples)]

    @torch.no_grad()
    def advantages(self, critic, reference, examples: list[Example]) -> list[list[list[float]]]:
        """Equation 3 for every turn of every branch of every example (a head's values have no reference)."""
        scores: list[list[list[float]]] = []
        for batch in micro_batches(examples, self.settings.micro_batch):
            logps, turn_ids = self.trainer.log_probs(critic, batch)  # (R, T)
            ref_logps = 0 if isinstance(critic, HeadCritic) else self.trainer.log_probs(reference, batch)[0]  # (R, T)
            rows = iter(turn_advantages(logps, ref_logps, turn_ids, not self.settings.no_normalize).tolist())  # R lists
            scores += [[next(rows) for _ in example.branches] for example in batch]
        return scores

    # --- stage 5
    def turn_pairs(self, path: Path) -> None:
        """Of each turn's candidates, 4 times a random one of the top half against one of the bottom half."""
        s, rows = self.settings, []
        rng = random.Random(f"{s.seed} turn pairs")
        for row in colbench.read_jsonl(self.run.path("candidates.jsonl"), CANDIDATES, check_lists):
            ranked = sorted(zip(row["advantages"], candidate_messages(row)), key=lambda pair: -pair[0])
            half = len(ranked) // 2
            for _ in range(s.pairs_per_turn if half else 0):
                (high, chosen), (low, rejected) = rng.choice(ranked[:half]), rng.choice(ranked[-half:])
                if high > low and chosen["content"] != rejected["content"]:
                    rows.append({"prompt": row["messages"], "chosen": [chosen], "rejected": [rejected]})
        if not rows:
            raise InputError(f"{self.run.path('candidates.jsonl')}: no turn has two candidates that differ in text and score")
        print(f"  {len(rows)} pairs")
        self.run.write_jsonl(path, rows)

    # --- stage 6
    def actor(self, path: Path) -> None:
        """Equation 4 on pairs of candidates, without c; the pairs of one turn share its history's computation."""
        s = self.settings
        model, tokenizer, encoder = self.model("base", train=True)
        branches: dict[str, list[Branch]] = {}
        for row in colbench.read_jsonl(self.run.path("turn_pairs.jsonl"), TURN_PAIR, check_lists):
            pair = encoder.candidates(row["prompt"], [row["chosen"][-1], row["rejected"][-1]])
            branches.setdefault(json.dumps(row["prompt"]), []).extend(pair)
        examples = [Example(group) for group in branches.values()]
        objective = dpo_objective(s.actor_beta, s.actor_nll)
        self.fit(path, model, tokenizer, examples, objective, s.actor_lr, s.actor_epochs, s.batch_size, reference=True)

    def multi_turn_dpo(self, path: Path) -> None:
        """Baseline: the critic's pairs without c, log-probs summed over all agent tokens of a dialogue."""
        s = self.settings
        objective = dpo_objective(s.mt_dpo_beta, s.mt_dpo_nll)
        self.train_on_pairs(path, "trajectory_pairs.jsonl", objective, False, s.mt_dpo_lr, s.mt_dpo_epochs)

    def rft(self, path: Path) -> None:
        """Baseline: the likelihood of the agent's tokens in successful dialogues, of pages in each task's best one."""
        s = self.settings
        model, tokenizer, encoder = self.model("base", train=True)
        trajectories = self.trajectories(self.run.path("trajectories.jsonl"))
        chosen = {id(group[i]) for group in task_groups(trajectories) for i in self.benchmark.good([t.reward for t in group])}
        good = [Example([encoder.dialogue(self.with_system(t.dialogue))]) for t in trajectories if id(t) in chosen]
        if not good:
            raise InputError(f"{self.run.path('trajectories.jsonl')}: no successful dialogue to fine-tune on")
        objective = likelihood_objective(mean_tokens(good))
        self.fit(path, model, tokenizer, good, objective, s.rft_lr, s.rft_epochs, s.rft_batch_size, reference=False)

    # --- stage 7
    def evaluate(self, method: str, path: Path) -> None:
        """Play the held-out tasks, sampled at temperature 1 as in the paper, or greedy."""
        s, choose = self.settings, None
        single, greedy = method == "single-turn", path.name.endswith("_greedy.jsonl")
        agent, human = self.players(AGENTS[method], 0.0 if greedy else 1.0, self.single_turn_system if single else None)
        if s.best_of and not greedy:
            agent, choose = functools.partial(agent.sample, n=s.best_of), self.chooser()
        self.play(path, self.tasks("test"), agent, human, 1 if single else s.max_turns, choose)

    def scored_dialogues(self, trajectories: list[Trajectory]) -> list[dict]:
        """What there is to show of each dialogue; with a critic, each agent message has its advantage."""
        scores = [[[None] * len(t.turns)] for t in trajectories]
        if self.run.path("critic").exists():
            reference, (critic, _, encoder) = self.model("base")[0], self.critic_model()
            branches = [encoder.dialogue(self.with_system(t.dialogue), self.hint(t.task.ground_truth)) for t in trajectories]
            scores = self.advantages(critic, reference, [Example([branch]) for branch in branches])
        shown = []
        for trajectory, (turns,) in zip(trajectories, scores, strict=True):
            messages, advantages = colbench.visible(trajectory.dialogue), iter(turns)
            for message in messages:
                if message["role"] == "assistant":
                    message["advantage"] = next(advantages)
            shown.append({"reward": trajectory.reward, "answer": trajectory.answer, "dialogue": messages})
        return shown


WARM_UP_EPOCHS = 11
WARM_UP_KINDS = ("plain", "hinted", "told", "plain", "hinted", "told", "plain", "hinted", "single")


def prompt_file(path: str | None, default: str) -> str:
    """A prompt from a file, or ours."""
    if path is None:
        return default
    try:
        prompt = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: the prompt cannot be read ({error})") from None
    if not prompt.strip():
        raise InputError(f"{path}: expected a prompt, found an empty file")
    return prompt


def first_tasks(trajectories: list[Trajectory], count: int | None) -> list[Trajectory]:
    """The trajectories of the first `count` tasks, in order."""
    kept = set(list(dict.fromkeys(t.task.problem_description for t in trajectories))[:count])
    return [t for t in trajectories if t.task.problem_description in kept]


DIALOGUE_PAIR = {"chosen": [colbench.MESSAGE], "rejected": [colbench.MESSAGE]}
TURN_PAIR = DIALOGUE_PAIR | {"prompt": [colbench.MESSAGE]}
CANDIDATES = {"messages": [colbench.MESSAGE], "candidates": [str], "advantages": [float], "truncated?": [bool]}


def check_lists(row: dict, where: str) -> None:
    """No list is empty; of a pair, each side has a message of the agent; of candidates, each has an advantage."""
    for name in ("prompt", "messages", "candidates", "chosen", "rejected"):
        if row.get(name) == []:
            raise InputError(f"{where}, {name!r}: expected at least one, found an empty list")
    for side in ("chosen", "rejected"):
        messages = row.get(side, [])[-1 if "prompt" in row else 0 :]  # a dialogue may end with a human who leaves
        if messages and not any(message["role"] == "assistant" for message in messages):
            raise InputError(f"{where}, {side!r}: expected a message of the agent, found none")
    lengths = [len(row[name]) for name in ("candidates", "advantages", "truncated") if row.get(name)]
    if len(set(lengths)) > 1:
        raise InputError(f"{where}: expected as many advantages as candidates, found lists of {lengths}")


def task_groups(trajectories: list[Trajectory]) -> list[list[Trajectory]]:
    """The dialogues that have a reward and a message of the agent, task by task."""
    by_task: dict[str, list[Trajectory]] = {}
    for t in trajectories:
        if t.reward is not None and t.turns:
            by_task.setdefault(t.task.problem_description + t.task.ground_truth, []).append(t)
    return list(by_task.values())


def candidate_messages(row: dict) -> list[Message]:
    """The candidates of a row as assistant messages."""
    cut = row.get("truncated") or [False] * len(row["candidates"])
    return [
        {"role": "assistant", "content": text} | ({"truncated": True} if truncated else {})
        for text, truncated in zip(row["candidates"], cut)
    ]


def mean_tokens(examples: list[Example]) -> float:
    """Mean number of agent tokens of an example's first branch."""
    return sum(sum(map(len, e.branches[0].actions)) for e in examples) / len(examples)


def metrics_line(history: list[dict]) -> str:
    """First and last tenth of each metric."""
    tenth = max(1, len(history) // 10)
    means = {
        key: [sum(row[key] for row in part) / tenth for part in (history[:tenth], history[-tenth:])]
        for key in history[0]
        if key not in ("run", "step", "lr", "grad_norm")
    }
    return ", ".join(f"{key} {first:.3f} -> {last:.3f}" for key, (first, last) in means.items())


# ---------------------------------------------------------------------------------------------------------
# 9. Will it fit?  From config.json alone, before anything else is downloaded or loaded
PARTS = ("weights", "gradients, Adam", "activations", "KV cache")


def memory_here(device: torch.device) -> int:
    """Bytes of memory: what is free on the GPU, or all RAM."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def return_freed_memory() -> None:
    """Without this, glibc keeps freed blocks below 32 MB, and activations on a CPU take up to twice their memory."""
    with contextlib.suppress(AttributeError, TypeError, OSError):  # another C library
        ctypes.CDLL(None).mallopt(-3, 2**20)  # M_MMAP_THRESHOLD: blocks from 1 MB on go back


def parameters(model) -> int:
    """How many numbers a model has."""
    return sum(weight.numel() for weight in model.parameters())


def at_work(model) -> int:
    """How many numbers of a sharded model are whole at a time: the embeddings and two layers."""
    layers = parameters(layers_of(model))
    return parameters(model) - layers + 2 * layers // model.config.get_text_config().num_hidden_layers


def frozen_memory(model, low: int, sharded: bool) -> int:
    """Bytes of a model at `low` bytes a number: all of it, or a share and, as it arrives and in its place, what is at work."""
    size = low * parameters(model)
    return size // RANKS + 2 * low * at_work(model) if sharded else size


def memory_needed(s: Settings, dtype: torch.dtype) -> dict[str, list[int]]:
    """{stage: bytes of each of PARTS} at the most, with all dialogues as long as --max-length."""
    model, stages = empty_model(s.model), s.stages.split(",")
    config, head, low = model.config.get_text_config(), model.get_output_embeddings(), dtype.itemsize
    size = parameters(model)
    linear = [layer for layer in model.modules() if isinstance(layer, torch.nn.Linear) and layer is not head]
    adapters = sum((s.lora or 0) * (layer.in_features + layer.out_features) for layer in linear)
    frozen = frozen_memory(model, low, s.shard)
    more = low * size // RANKS if s.shard else 4 * adapters or frozen  # a second model: another one, or adapters of the first
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    wide = 6 * config.hidden_size + 3 * inner  # numbers of a token in a layer at work
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache = 2 * config.num_hidden_layers * heads * head_dim * low  # bytes of a token

    def forward(rows: int, length: int) -> int:
        return rows * length * wide * low + rows * length**2 * (1 + low)  # the mask, as bool and as numbers

    need, n = {}, s.candidates
    if {"critic", "actor"} & set(stages) and {"rft", "mt-dpo", "sweet"} & set(s.methods.split(",")):
        pairs, length = max(1, s.micro_batch // 2), 2 * s.max_length  # a row holds both dialogues of a pair
        each = low if s.lora or RANKS > 1 else 4  # bytes: float32 weights pass float32 on
        kept = pairs * length * config.num_hidden_layers * config.hidden_size * each  # input of each layer
        logits = 4 * 4 * min(LOGITS_AT_ONCE, pairs * length * config.vocab_size)  # float32, 4 copies
        state = 12 * (adapters or size) // RANKS
        weights = frozen + more if s.lora else 4 * size
        if RANKS > 1 and s.lora:
            weights = frozen_memory(model, low, True) + 4 * adapters // RANKS + (0 if s.shard else frozen)
        elif RANKS > 1:
            weights = 4 * size // RANKS + (2 * low + 4) * at_work(model)  # as weights, gradients, and their sum on its way
        need["training"] = [weights, state, kept + 2 * forward(pairs, length) + logits, 0]
    if "candidates" in stages and "sweet" in s.methods.split(","):
        rows, length = max(n, s.generate_batch), s.max_length + n * s.max_new_tokens  # all candidates in one row
        if not s.agent:
            need["candidates"] = [frozen + more, 0, forward(rows // n, s.max_length), rows * s.max_length * cache]
        need["their scores"] = [frozen + more, 0, forward(max(1, s.micro_batch // n), length), 0]
    if "evaluate" in stages or "collect" in stages and not s.trajectories:
        human, sees = more if s.human_model else 0, s.task == "frontend"
        if s.human_model and (sees or s.human_model != s.model):
            human = frozen_memory(empty_model(s.human_model, sees), low, s.shard and not sees)
        weights = frozen + human
        if human or not s.agent or "evaluate" in stages and {"rft", "mt-dpo", "sweet"} & set(s.methods.split(",")):
            need["dialogues"] = [weights, 0, forward(s.generate_batch, s.max_length), s.generate_batch * s.max_length * cache]
    return need


def print_needs(need: dict[str, list[int]]) -> None:
    """The table of the plan."""
    print(f"  {'GB at the most':15s}" + "".join(f"{part:>17s}" for part in (*PARTS, "in all")))
    for stage, parts in need.items():
        print(f"  {stage:15s}" + "".join(f"{part / 2**30:17.1f}" for part in (*parts, sum(parts))))


def plan(s: Settings, argv: list[str], device: torch.device, dtype: torch.dtype) -> Settings:
    """Print what each stage needs and what there is; returns settings that fit, or raises InputError.

    Smaller batches in memory, and adapters instead of full training, are chosen here; shorter dialogues are not.
    """
    return_freed_memory()
    sizes = ["", "--micro-batch 2 --generate-batch 16", "--micro-batch 2 --generate-batch 4"]
    loras, shards = [""] if s.lora else ["", "--lora 16"], ["", "--shard"] if RANKS > 1 else [""]
    free = [" ".join(filter(None, flags)) for flags in itertools.product(loras, shards, sizes)]
    shorter = [f"{free[-1]} --max-length {length}" for length in (4096, 2048, 1024) if length < s.max_length]
    have = 0.9 * min(gathered(memory_here(device)))  # a tenth is left to everything else
    print(f"plan: {s.model}, {parameters(empty_model(s.model)) / 1e9:.2f} B parameters; here: {have / 2**30:.1f} GB to use")
    for flags in (*free, *shorter):
        chosen = parse_settings([*argv, *flags.split()])
        need = memory_needed(chosen, dtype)
        most, stage = max(((sum(parts), stage) for stage, parts in need.items()), default=(0, ""))
        if flags == free[0]:
            print_needs(need)
        if most <= have:
            break
    if flags and flags in free and most <= have:
        print(f"  this is too much; with {flags}, chosen therefore, it is")
        print_needs(need)
    elif flags or most > have:
        fitting = f"with {flags} it would fit" if most <= have else f"with {flags} it would still need {most / 2**30:.1f} GB"
        raise InputError(
            f"{s.model} does not fit here with dialogues of --max-length {s.max_length} tokens, {stage} least of all\n"
            f"  {fitting}\n  --simulator URL leaves the human to a server, --stages those stages to another machine"
        )
    return chosen


# ---------------------------------------------------------------------------------------------------------
# 10. The command line
def builders(sweet: Sweet) -> dict[str, Callable[[Path], None]]:
    """What makes each product."""
    made = {
        "base": sweet.warm_up,
        "trajectories.jsonl": sweet.collect,
        "trajectory_pairs.jsonl": sweet.pairs,
        "critic": sweet.critic,
        "candidates.jsonl": sweet.candidates,
        "turn_pairs.jsonl": sweet.turn_pairs,
        "actor": sweet.actor,
        "rft": sweet.rft,
        "mt-dpo": sweet.multi_turn_dpo,
    }
    for method in METHODS:
        for name in (f"eval_{method}.jsonl", f"eval_{method}_greedy.jsonl"):
            made[name] = lambda path, method=method: sweet.evaluate(method, path)
    return made


def wanted_products(s: Settings) -> list[str]:
    """What the asked-for stages make for the asked-for methods: their evaluations and everything upstream."""
    wanted: set[str] = set()

    def add(product: str) -> None:
        wanted.add(product)
        for other in inputs_of(product, s):
            add(other)

    for method in s.methods.split(","):
        add(f"eval_{method}.jsonl")
        add(f"eval_{method}_greedy.jsonl")
    if not s.is_tiny:
        wanted.discard("base")
    return [name for name in PRODUCTS if name in wanted and PRODUCTS[name][0] in s.stages.split(",")]


def run_stages(sweet: Sweet) -> None:
    """Make what is missing, stage by stage; refuse before anything is made if a file there is of another run."""
    wanted, made = wanted_products(sweet.settings), builders(sweet)
    for product in wanted:
        sweet.run.check(product)
    if not all(sweet.run.path(product).exists() for product in wanted):
        sweet.check_inputs()
    for stage in STAGES:
        products = [name for name in wanted if PRODUCTS[name][0] == stage]
        missing = [name for name in products if not sweet.run.path(name).exists()]
        with sweet.run.timed(stage) if missing else contextlib.nullcontext():
            for product in products:
                sweet.run.make(product, made[product])


def results(sweet: Sweet) -> dict:
    """Figures of each method from its eval files, into results.json; those of an earlier run's methods stay."""
    methods, asked = {}, sweet.settings.methods.split(",")
    there = {path.stem for path in sweet.run.out.glob("eval_*.jsonl")}
    for method in [m for m in METHODS if m in asked or {f"eval_{m}", f"eval_{m}_greedy"} <= there]:
        figures = {}
        for name in ("", "_greedy"):
            path = sweet.run.path(f"eval_{method}{name}.jsonl")
            trajectories = sweet.trajectories(path)
            scored, failed = [t for t in trajectories if t.reward is not None], sum(t.failed is not None for t in trajectories)
            if not scored:
                why = f"{failed} of {len(trajectories)} failed, of the others no reference runs"
                raise InputError(f"{path}: no dialogue has a reward, {why}")
            others = opponent_rewards(sweet, name, scored) if "win_rate" in sweet.benchmark.columns else None
            figures[name] = sweet.benchmark.figures([t.reward for t in scored], others)
            figures[name] |= {"invalid": len(trajectories) - len(scored) - failed, "failed": failed}
        methods[method] = figures[""] | {"greedy": figures["_greedy"]}
    answer = {"methods": methods}
    sweet.run.write_json("results.json", answer)
    return answer


def opponent_rewards(sweet: Sweet, name: str, trajectories: list[Trajectory]) -> list[float] | None:
    """Rewards of --against, by default of the zero-shot agent, on the same tasks; None where it has not played."""
    path = Path(sweet.settings.against or sweet.run.path(f"eval_zero-shot{name}.jsonl"))
    if not path.exists() and not sweet.settings.against:
        return None
    others = {(t.task.problem_description, t.task.ground_truth): t.reward for t in sweet.trajectories(path)}
    try:
        return [others[t.task.problem_description, t.task.ground_truth] for t in trajectories]
    except KeyError:
        raise InputError(f"{path}: not every held-out task of this run was played there, so there is no win rate") from None


def print_table(methods: dict, columns: dict[str, str]) -> None:
    """The benchmark's figures in percent with 95 % intervals; greedy beside sampled."""

    def cell(figures: dict, key: str) -> str:
        if key not in figures:
            return "-"
        low, high = figures[key + "_interval"]
        return f"{100 * figures[key]:5.1f} [{100 * low:4.1f}, {100 * high:5.1f}]"

    first = next(iter(columns))
    heads = [*columns.values(), "greedy " + columns[first]]
    failed = {method: f["failed"] + f["greedy"]["failed"] for method, f in methods.items()}  # a server broke them off
    shown = any(failed.values())
    print(f"\n{'method':12s} " + " ".join(f"{head:>20s}" for head in heads) + "    n" + "  failed" * shown)
    for method, f in methods.items():
        cells = [*(cell(f, key) for key in columns), cell(f["greedy"], first)]
        print(f"{method:12s} " + " ".join(f"{text:>20s}" for text in cells) + f" {f['n']:4d}" + f" {failed[method]:7d}" * shown)


def before_and_after(sweet: Sweet, count: int = 40) -> list[dict]:
    """The first `count` held-out tasks as zero-shot and as SWEET-RL played them, if both did, to be shown.

    The first that SWEET-RL solves and zero-shot does not is marked, and is among them wherever it stands.
    """
    if not {"zero-shot", "sweet"} <= set(sweet.settings.methods.split(",")):
        return []
    before, after = (sweet.trajectories(sweet.run.path(f"eval_{method}.jsonl")) for method in ("zero-shot", "sweet"))
    better = [i for i, (b, a) in enumerate(zip(before, after)) if a.reward == 1.0 and b.reward != 1.0][:1]
    indices = sorted({*range(min(count, len(before))), *better})
    sides = iter(sweet.scored_dialogues([side[i] for i in indices for side in (before, after)]))
    rows = [
        {
            "task": i + 1,
            "first_better": i in better,
            "reference": before[i].task.ground_truth,
            "before": next(sides),
            "after": next(sides),
        }
        for i in indices
    ]
    if sweet.settings.task == "frontend":
        for row in rows:
            pages = [row["before"]["answer"], row["reference"], row["after"]["answer"]]
            row["pictures"] = [picture_url(picture) for picture in colbench.render(pages, sweet.settings.stylesheet)]
    return rows


def picture_url(picture, width: int = 320) -> str:
    """A screenshot, made small, as an address that holds the picture itself."""
    file = io.BytesIO()
    picture.resize((width, max(1, picture.height * width // picture.width))).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def show_dialogue(rows: list[dict]) -> None:
    """The first held-out task that SWEET-RL solves and zero-shot does not (else the first), turn by turn."""
    row = next((row for row in rows if row["first_better"]), rows[0])
    chosen = "the first that SWEET-RL solves and zero-shot does not" if row["first_better"] else "the first"
    print(f"\nheld-out task {row['task']} ({chosen}); [A] is the critic's advantage of the turn")
    for name in ("before", "after"):
        print(f"\n--- {name} training: reward {row[name]['reward']}")
        for message in row[name]["dialogue"]:
            agent = message["role"] == "assistant"
            score = f"[{message['advantage']:+.2f}]" if agent else ""
            text = message["content"].replace("\n", "\n                 ")
            print(f"{score:8s} {'agent' if agent else 'human'}:  {text}")
    print("\nreference:\n    " + row["reference"].replace("\n", "\n    "))


def training_curves(rows: list[dict], points: int = 200) -> dict[str, dict[str, list[float]]]:
    """{run: {metric: values}}, at most `points` of each, a value the mean over consecutive steps."""
    runs: dict[str, list[dict]] = {}
    for row in rows:
        runs.setdefault(row["run"], []).append(row)
    curves = {}
    for run, history in runs.items():
        size = math.ceil(len(history) / points)
        parts = [history[i : i + size] for i in range(0, len(history), size)]
        keys = [key for key in history[0] if key != "run"]
        curves[run] = {key: [sum(row.get(key, math.nan) for row in part) / len(part) for part in parts] for key in keys}
    return curves


def write_report(sweet: Sweet, methods: dict, dialogues: list[dict], turns: int = 20) -> None:
    """report.html, one page that needs nothing else: assets/report.html with the run's data in it."""
    turns_file = sweet.run.path("candidates.jsonl")
    shaping = [f.name for f in dataclasses.fields(Settings) if f.metadata["group"] != "machine"]
    data = {
        "settings": {name: getattr(sweet.settings, name) for name in shaping},
        "methods": methods,
        "columns": sweet.benchmark.columns,
        "curves": training_curves(sweet.run.metrics()),
        "dialogues": dialogues,
        "turns": colbench.read_jsonl(turns_file, CANDIDATES, check_lists)[:turns] if turns_file.exists() else [],
    }
    template = (Path(__file__).parent / "assets" / "report.html").read_text(encoding="utf-8")
    colbench.write_whole(sweet.run.path("report.html"), fill_report(template, data).encode())


def fill_report(template: str, data: dict) -> str:
    """The template with the data as JSON, in which a text can neither close its element nor run.

    Numbers are cut to four digits; NaN and infinity, which JSON has no word for, become null.
    """
    data = json.loads(json.dumps(data), parse_float=lambda text: float(f"{float(text):.4g}"), parse_constant=lambda _: None)
    text = json.dumps(data)
    for char in "<>&":
        text = text.replace(char, f"\\u{ord(char):04x}")
    nonce = hashlib.sha256(text.encode()).hexdigest()  # what only the page's own script can name
    return colbench.fill(template, nonce=nonce, data=text)


def run_program(argv: list[str]) -> None:
    """The whole program, in each of torchrun's processes."""
    gathered(None)  # a fault that shows at once is to find all of them joined
    settings = parse_settings(argv)
    start = time.time()
    why = "no --model given: a tiny one is built, with settings of its own" if settings.is_tiny else "table 5 of the paper"
    print(f"model: {settings.model}; settings: {why}; files: {settings.out}/")
    machine = pick_device(settings)
    if not settings.is_tiny:
        settings = plan(settings, argv, *machine)
    if settings.plan:
        return
    sweet = Sweet(settings, machine)
    if settings.task == "backend":
        print(f"reward: {colbench.reward_protections()}")
    run_stages(sweet)
    show_results(sweet)
    print(f"\n{time.time() - start:.0f} s in all; files in {settings.out}/")
    gathered(None)


def show_results(sweet: Sweet) -> None:
    """The table, a dialogue, and report.html; every process takes part, as sharded models score the dialogue."""
    methods, dialogues = {}, []
    if "evaluate" in sweet.settings.stages.split(","):
        methods, dialogues = results(sweet)["methods"], before_and_after(sweet)
        print_table(methods, sweet.benchmark.columns)
        if dialogues and sweet.run.path("critic").exists():
            show_dialogue(dialogues)
    if RANK == 0:
        write_report(sweet, methods, dialogues)


def main(argv: list[str] | None = None) -> int:
    """Run the program; returns the exit status: 0, 2 for what the user can mend, 130 for Ctrl-C."""
    with processes() as first:
        try:
            run_program(sys.argv[1:] if argv is None else argv)
            return 0
        except KeyboardInterrupt:
            status, line = 130, STOPPED
        except InputError as error:
            status, line = 2, f"error: {error}"
        except Exception:
            if first():
                raise
            return 2  # another process is gone, and has said why
        if first():
            print(line, file=sys.stderr)
        return status


if __name__ == "__main__":
    sys.exit(main())
