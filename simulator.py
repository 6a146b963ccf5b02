"""The human on the other side of ColBench, and what it takes to talk: chat models, local or behind a URL.

Reading order
    1. From messages to tokens    one chat template, one path from text to ids, for prompts and for scoring
    2. ChatModel                  sampling from an HF model; n samples of one history share its prefill
       SeeingChatModel            a vision-language model, which reads pictures in a message too
    3. ChatServer                 the same from an OpenAI-compatible URL
       ServerAgent                such a model as the agent
    4. Humans                     scripted, local model, server, keyboard: one call, `reply(tasks, dialogues)`

The chat model and the server also play the agent, which is why they live on this side of sweet_rl.py.
"""

import base64
import contextlib
import functools
import io
import itertools
import json
import os
import re
import threading
import time
from collections.abc import Callable
from urllib.parse import urlsplit

import requests
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationConfig
from transformers.cache_utils import DynamicLayer

from colbench import (
    CHOICES,
    ENOUGH,
    FACT,
    GOODBYE,
    HUMAN_PROMPT,
    NO_PAGE,
    PAGE_FACT,
    SATISFIED,
    UNKNOWN,
    Action,
    Failure,
    InputError,
    Message,
    Task,
    dialogue_text,
    fill,
    miniature_choices,
    miniature_details,
    page_in,
    render,
    visible,
)


# ---------------------------------------------------------------------------------------------------------
# 1. From messages to tokens
@functools.lru_cache
def has_system_role(tokenizer) -> bool:
    """Whether the chat template shows a system message (some refuse one, some drop it)."""
    probe = [{"role": "system", "content": "probe"}, {"role": "user", "content": "hi"}]
    try:
        return "probe" in tokenizer.apply_chat_template(probe, tokenize=False)
    except Exception:  # a template refuses by raising whatever its author chose
        return False


def chat_prompt(tokenizer, messages: list[Message]) -> str:
    """The messages as the template writes them, up to where the agent's next action begins.

    Without a system role, what the system message says goes to the head of the first user message.
    """
    if messages[0]["role"] == "system" and not has_system_role(tokenizer):
        system, first, *rest = messages
        messages = [first | {"content": f"{system['content']}\n\n{first['content']}"}, *rest]
    # A fixed date: some templates print today's, and a prompt must not change from one day to the next.
    return tokenizer.apply_chat_template(
        visible(messages), tokenize=False, add_generation_prompt=True, date_string="26 Jul 2024"
    )


def text_ids(tokenizer, text: str) -> list[int]:
    """Token ids of a text.  The template has written the BOS token already, so none is added."""
    text = text.encode("utf-8", "replace").decode()  # half a surrogate pair is no text
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def end_ids(model, tokenizer) -> list[int]:
    """Every id that ends a message: Llama-3.1 has three."""
    configured = model.generation_config.eos_token_id
    ids = configured if isinstance(configured, list) else [configured]
    return sorted({i for i in [*ids, tokenizer.eos_token_id] if i is not None})


def without_reasoning(text: str) -> str:
    """A reply without the model's private reasoning, whose opening tag may stand in the prompt."""
    return re.sub(r"<think>.*?(</think>|$)", "", text, flags=re.DOTALL).rpartition("</think>")[2].strip()


@contextlib.contextmanager
def plain_settings(model):
    """`generate` fills what a call leaves open from the model's own settings, top_p or repetition_penalty say;
    samples would then not come from the distribution that is scored.  Here it finds nothing there."""
    own, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own


# ---------------------------------------------------------------------------------------------------------
# 2. ChatModel
class RoomyLayer(DynamicLayer):
    """A layer's cache with room behind its tokens: DynamicLayer copies all of it, history and all, for each new one."""

    room = 64

    def __init__(self, keys: Tensor, values: Tensor):  # (B, heads, tokens, D) each
        super().__init__()
        self.keys, self.values, self.length, self.is_initialized = keys, values, keys.shape[2], True

    def update(self, keys: Tensor, values: Tensor, *_, **__) -> tuple[Tensor, Tensor]:
        """Add what is new; returns all there is."""
        start, self.length = self.length, self.length + keys.shape[2]
        if self.length > self.keys.shape[2]:
            self.keys, self.values = (F.pad(old, (0, 0, 0, keys.shape[2] + self.room)) for old in (self.keys, self.values))
        self.keys[:, :, start : self.length], self.values[:, :, start : self.length] = keys, values
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def get_seq_length(self) -> int:
        return self.length


class ChatModel:
    """An HF causal language model behind its chat template, for sampling.

    As an agent it is called with a batch of histories and answers each under `system`, its system prompt.
    """

    def __init__(self, model, tokenizer, system="", temperature=1.0, max_new_tokens=1024, batch_size=8):
        self.model, self.tokenizer, self.system = model, tokenizer, system
        self.temperature, self.max_new_tokens, self.batch_size = temperature, max_new_tokens, batch_size
        self.ends = end_ids(model, tokenizer)

    def __call__(self, histories: list[list[Message]]) -> list[Action]:
        return [samples[0] for samples in self.sample(histories, 1)]

    def sample(self, histories: list[list[Message]], n: int) -> list[list[Action]]:
        """`n` actions for each history, at most `batch_size` rows at a time, longest prompts together."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        prompts = [chat_prompt(self.tokenizer, system + history) for history in histories]
        order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
        step, actions = max(1, self.batch_size // n), {}
        for start in range(0, len(order), step):
            chosen = order[start : start + step]
            actions |= zip(chosen, self.generate([prompts[i] for i in chosen], n))
        return [actions[i] for i in range(len(prompts))]

    @torch.no_grad()
    def generate(self, prompts: list[str], n: int) -> list[list[Action]]:
        """`n` actions for each formatted prompt.

        A history is the long part and its samples are short, so it is read once: its cache is repeated n
        times, and only its last token, which the next-token distribution comes from, is fed n times.
        """
        rows = [text_ids(self.tokenizer, prompt) for prompt in prompts]
        width, pad = max(map(len, rows)), self.ends[0]
        device = self.model.device
        ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows], device=device)  # (B, W)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)  # (B, W)
        cache = None
        if n > 1 and width > 1:
            cache = self.model(
                ids[:, :-1],
                attention_mask=mask[:, :-1],
                position_ids=(mask.cumsum(1) - 1).clamp(min=0)[:, :-1],
                use_cache=True,
                logits_to_keep=1,
            ).cache
            cache.batch_repeat_interleave(n)
            roomy = [RoomyLayer(old.keys, old.values) if type(old) is DynamicLayer else old for old in cache.layers]
            cache.layers = roomy
        with plain_settings(self.model):
            sampled = self.model.generate(
                ids.repeat_interleave(n, 0),  # (B * n, W)
                attention_mask=mask.repeat_interleave(n, 0),
                cache=cache,
                generation_config=self.generation_config(pad),
                synced_gpus=False,  # a sharded model sees to that itself
            )[:, width:].tolist()  # (B * n, at most max_new_tokens)
        return [
            [self.action(prompt, tokens) for tokens in sampled[i * n : (i + 1) * n]] for i, prompt in enumerate(prompts)
        ]

    def generation_config(self, pad: int) -> GenerationConfig:
        """Plain sampling, or greedy at temperature 0.  Nothing is taken over from the model's own settings."""
        sampling = {"temperature": self.temperature, "top_k": 0, "top_p": 1.0} if self.temperature else {}
        return GenerationConfig(
            do_sample=self.temperature > 0,
            max_new_tokens=self.max_new_tokens,
            eos_token_id=self.ends,
            pad_token_id=pad,
            **sampling,
        )

    def action(self, prompt: str, tokens: list[int]) -> Action:
        """The text up to the first end token; without one, the message was cut at the length limit."""
        length = next((i for i, token in enumerate(tokens) if token in self.ends), len(tokens))
        text = self.tokenizer.decode(tokens[:length], skip_special_tokens=True)
        return Action(text, prompt, truncated=length == len(tokens))


class SeeingChatModel(ChatModel):
    """Qwen2-VL and its like: the content of a message may be a list of {"type": "image", "image": PIL.Image} and
    {"type": "text", "text": str}.

    The processor that comes with such a model also wants torchvision, for videos.  Its image processor alone does
    not; what remains is to repeat the token that stands for a picture as often as the model has vectors for it.
    """

    def __init__(self, model, tokenizer, **settings):
        from transformers import AutoImageProcessor

        super().__init__(model, tokenizer, **settings)
        size = {"shortest_edge": 4 * 28 * 28, "longest_edge": 1280 * 28 * 28}  # pixels: at most 1,280 tokens a picture
        self.image_processor = AutoImageProcessor.from_pretrained(model.name_or_path, size=size)
        if not hasattr(self.image_processor, "merge_size"):
            raise InputError(f"model {model.name_or_path}: expected Qwen2-VL or its kin; others can see behind a server")
        self.image_id = model.config.image_token_id

    def __call__(self, histories: list[list[Message]]) -> list[Action]:
        steps = range(0, len(histories), self.batch_size)
        return [action for start in steps for action in self.look(histories[start : start + self.batch_size])]

    @torch.no_grad()
    def look(self, histories: list[list[Message]]) -> list[Action]:
        """An action for each history, all in one batch."""
        parts = [[part for m in history for part in m["content"] if part["type"] == "image"] for history in histories]
        seen = self.image_processor([part["image"] for row in parts for part in row], return_tensors="pt")
        tokens = iter((seen["image_grid_thw"].prod(1) // self.image_processor.merge_size**2).tolist())
        prompts = [chat_prompt(self.tokenizer, history) for history in histories]
        rows = [self.picture_ids(p, list(itertools.islice(tokens, len(row)))) for p, row in zip(prompts, parts)]
        width, pad = max(map(len, rows)), self.ends[0]
        ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows])  # (B, W)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])  # (B, W)
        inputs = {"input_ids": ids, "attention_mask": mask, "mm_token_type_ids": (ids == self.image_id).int(), **seen}
        inputs = {name: tensor.to(self.model.device) for name, tensor in inputs.items()}
        with plain_settings(self.model):
            sampled = self.model.generate(**inputs, generation_config=self.generation_config(pad))
        return [self.action(prompt, row) for prompt, row in zip(prompts, sampled[:, width:].tolist())]

    def picture_ids(self, prompt: str, tokens: list[int]) -> list[int]:
        """Ids of a prompt whose i-th picture takes `tokens[i]` tokens; where more are named, in a text, is none."""
        sign = self.tokenizer.convert_ids_to_tokens(self.image_id)
        before, *behind = prompt.split(sign)
        behind = [sign * n + text for n, text in itertools.zip_longest(tokens, behind, fillvalue=0)]
        return text_ids(self.tokenizer, before + "".join(behind))


# ---------------------------------------------------------------------------------------------------------
# 3. ChatServer
ANSWER_LIMIT = 1 << 24  # bytes that are read of a server's answer
LONGEST_WAIT = 30.0  # seconds, whatever a server asks for


def in_threads(work: Callable, items: list, parallel: int, seconds: float | None = None) -> list:
    """`work` of each item, so many at a time, in order; None where it takes more than `seconds`.

    Nothing waits for these threads, neither Ctrl-C nor the end of the program.
    """
    results, numbers = [None] * len(items), iter(range(len(items)))

    def worker() -> None:
        for i in numbers:
            results[i] = work(items[i])

    threads = [threading.Thread(target=worker, daemon=True) for _ in range(min(parallel, len(items)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    return results


def completion(choice: dict) -> Action:
    """A choice of the server's as an action.  Without content, as from a model that only reasoned, it is an empty one."""
    return Action("" + (choice["message"]["content"] or ""), truncated=choice.get("finish_reason") == "length")


class ChatServer:
    """An OpenAI-compatible chat endpoint (vLLM, Ollama, llama.cpp, OpenAI).

    `url` is the address that ends before /chat/completions, usually in /v1.  The key comes from the
    environment variable OPENAI_API_KEY; `model` is asked of the server where it is not given.  An answer may take
    `timeout` seconds, all `attempts` at it together.
    """

    def __init__(self, url: str, model: str | None = None, timeout: float = 300, attempts: int = 4, parallel: int = 16):
        parts = urlsplit(url)
        if not parts.hostname or parts.username or parts.query:
            raise InputError("a server's address: expected one like http://localhost:8000/v1, a key in OPENAI_API_KEY only")
        self.url, self.timeout, self.attempts, self.parallel = url.rstrip("/"), timeout, attempts, parallel
        self.failures = 0  # in a row, of conversations
        self.session = requests.Session()
        self.key = os.environ.get("OPENAI_API_KEY", "")
        if self.key:
            self.session.headers["Authorization"] = f"Bearer {self.key}"
        self.model = model or self.first_model()

    def first_model(self) -> str:
        """The name of the model that the server has, or the first of several."""
        return self.request("GET", "/models", lambda answer: answer["data"][0]["id"], "data[].id")

    def request(self, method: str, path: str, read: Callable, expected: str, body: dict | None = None):
        """What `read` finds in a JSON answer.  A busy or broken server is asked again, later each time, then given up."""
        deadline = time.monotonic() + self.timeout
        for attempt in range(self.attempts):
            late = None, f"no whole answer in {self.timeout:g} s", 0
            ask = lambda _: self.ask(method, path, read, expected, body)  # noqa: E731
            found, problem, wait = in_threads(ask, [None], 1, deadline - time.monotonic())[0] or late
            left = deadline - time.monotonic()
            if problem is None:
                return found
            if wait is None or left <= 0:
                break
            if attempt + 1 < self.attempts:
                time.sleep(min(max(wait, 0.5 * 2**attempt), LONGEST_WAIT, left))
        raise InputError(f"the server {self.url} does not answer {path} ({problem})")

    def ask(self, method: str, path: str, read: Callable, expected: str, body: dict | None) -> tuple:
        """(what was found, what is wrong, in how many seconds the server wants to be asked again; None: never)."""
        try:
            options = {"timeout": self.timeout, "stream": True, "allow_redirects": False}
            with self.session.request(method, self.url + path, json=body, **options) as response:
                text = response.raw.read(ANSWER_LIMIT, decode_content=True).decode("utf-8", "replace")
            if response.status_code == 200:
                return read(json.loads(text)), None, 0
            problem = f"status {response.status_code}: {(text.replace(self.key, '***') if self.key else text)[:100]!r}"
            if response.status_code not in (408, 409, 429) and response.status_code < 500:
                return None, problem, None
            wait = response.headers.get("Retry-After", "")
            return None, problem, float(wait) if re.fullmatch("[0-9]+", wait) else 0
        except (KeyError, TypeError, IndexError, AttributeError):
            return None, f"expected {expected}", 0
        except Exception as error:  # requests and urllib3 have dozens, json its own
            return None, type(error).__name__, 0

    def chat(self, messages: list[Message], temperature: float, max_tokens: int, n: int = 1) -> list[Action]:
        """`n` replies to one conversation, or as many Failures; after three rounds of nothing else the server is not asked."""
        body = {"model": self.model, "messages": messages, "temperature": temperature, "max_tokens": max_tokens}
        try:
            if self.failures >= 3 * self.parallel:
                raise InputError(f"the server {self.url} is given up: {self.failures} conversations in a row have failed")
            actions = self.choices(body, n)
            self.failures = 0
            return actions
        except InputError as error:
            self.failures += 1
            return [Action(Failure(error))] * n

    def choices(self, body: dict, n: int) -> list[Action]:
        """`n` replies: from one answer, one by one where the server refuses that, the missing ones where it sends fewer."""
        read = lambda answer: [completion(choice) for choice in answer["choices"][:n] or [{}]]  # noqa: E731
        try:
            found = self.request("POST", "/chat/completions", read, f"{n} choices[].message.content", body | {"n": n})
        except InputError:
            if n == 1:
                raise
            return [action for _ in range(n) for action in self.choices(body, 1)]
        return found + self.choices(body, n - len(found)) if len(found) < n else found

    def chat_many(self, conversations: list[list[Message]], **settings) -> list[list[Action]]:
        """`chat` for many conversations at once, answers in order."""
        return in_threads(lambda messages: self.chat(messages, **settings), conversations, self.parallel)


class ServerAgent:
    """A model behind a URL as an agent, called like a ChatModel.  What its template made of a prompt only it knows."""

    def __init__(self, server: ChatServer, system: str, temperature: float = 1.0, max_new_tokens: int = 1024):
        self.server, self.system, self.temperature, self.max_new_tokens = server, system, temperature, max_new_tokens

    def __call__(self, histories: list[list[Message]]) -> list[Action]:
        return [samples[0] for samples in self.sample(histories, 1)]

    def sample(self, histories: list[list[Message]], n: int) -> list[list[Action]]:
        """`n` actions for each history, or as many Failures."""
        conversations = [[{"role": "system", "content": self.system}, *visible(history)] for history in histories]
        return self.server.chat_many(conversations, temperature=self.temperature, max_tokens=self.max_new_tokens, n=n)


# ---------------------------------------------------------------------------------------------------------
# 4. Humans
#
# reply(tasks, dialogues) -> one reply per dialogue.  The dialogue ends with the agent's message; what it is
# like before that message was parsed stays out of sight.
class ScriptedSimulator:
    """The miniature's human: answers one question from the reference, "i do not know." otherwise.

    It says when it has told everything, and has no patience for the third question that it cannot answer: it leaves.
    """

    patience = 3

    def reply(self, tasks: list[Task], dialogues: list[list[Message]]) -> list[str]:
        return [self.reply_one(task, dialogue) for task, dialogue in zip(tasks, dialogues, strict=True)]

    def reply_one(self, task: Task, dialogue: list[Message]) -> str:
        replies = [m["content"] for m in dialogue if m["role"] == "user"]
        facts = {name: FACT.format(name, value) for name, value in miniature_details(task.ground_truth).items()}
        untold = {name: fact for name, fact in facts.items() if not any(fact in reply for reply in replies)}
        for name, fact in untold.items():
            if name in dialogue[-1]["content"]:
                return fact + (ENOUGH if len(untold) == 1 else "")
        return UNKNOWN if replies.count(UNKNOWN) + 1 < self.patience else GOODBYE


class ScriptedDesigner:
    """The human of the miniature's pages: names the most outstanding difference between the page shown and the one wanted."""

    def reply(self, tasks: list[Task], dialogues: list[list[Message]]) -> list[str]:
        return [self.reply_one(task, dialogue[-1]["content"]) for task, dialogue in zip(tasks, dialogues, strict=True)]

    def reply_one(self, task: Task, message: str) -> str:
        wanted, shown = miniature_choices(task.ground_truth), miniature_choices(message)
        different = [name for name in CHOICES if wanted.get(name) != shown.get(name)]
        if not shown:
            return NO_PAGE
        return PAGE_FACT.format(different[0], wanted[different[0]]) if different else SATISFIED


def page_pictures(tasks: list[Task], dialogues: list[list[Message]], stylesheet: str | None = None) -> list[tuple]:
    """What the human of frontend design sees: the page wanted and the page in the agent's last message, black if none."""
    wanted = [task.ground_truth for task in tasks]
    pictures = render(wanted + [page_in(dialogue[-1]["content"]) for dialogue in dialogues], stylesheet)
    return list(zip(pictures[: len(tasks)], pictures[len(tasks) :]))


def without_pages(messages: list[Message]) -> list[Message]:
    """A dialogue as somebody remembers it who sees pages and not their code."""
    page = re.compile(r"<(html|body)\b.*?(</\1\s*>|$)", re.IGNORECASE | re.DOTALL)
    return [m | {"content": page.sub("(a page)", m["content"])} for m in messages]


class PromptedSimulator:
    """A human played by a language model: it reads the reference and the dialogue in one prompt.

    With `pictures`, as `page_pictures`, it sees two pictures for each dialogue instead of reading the reference.
    `complete` takes a batch of such prompts, each a list of one message, and returns the replies.
    """

    def __init__(self, template: str = HUMAN_PROMPT, pictures=None):
        self.template, self.pictures = template, pictures

    def complete(self, conversations: list[list[Message]]) -> list[str]:
        raise NotImplementedError

    def reply(self, tasks: list[Task], dialogues: list[list[Message]]) -> list[str]:
        contents = [
            fill(
                self.template,
                problem_description=task.problem_description,
                hidden_information=task.ground_truth,
                dialogue_history=dialogue_text(without_pages(dialogue) if self.pictures else dialogue),
            )
            for task, dialogue in zip(tasks, dialogues, strict=True)
        ]
        if self.pictures:
            shown = [[{"type": "image", "image": p} for p in pair] for pair in self.pictures(tasks, dialogues)]
            contents = [[*pair, {"type": "text", "text": text}] for pair, text in zip(shown, contents)]
        texts = self.complete([[{"role": "user", "content": content}] for content in contents])
        return [text if isinstance(text, Failure) else without_reasoning(text) or "I don't know." for text in texts]


class LLMSimulator(PromptedSimulator):
    """A local HF model, greedy; it may be the very model that plays the agent.  To see, a vision-language model."""

    def __init__(self, model, tokenizer, template: str = HUMAN_PROMPT, batch_size: int = 8, pictures=None):
        super().__init__(template, pictures)
        kind = SeeingChatModel if pictures else ChatModel
        self.chat = kind(model, tokenizer, temperature=0.0, max_new_tokens=256, batch_size=batch_size)

    def complete(self, conversations):
        return [action.text for action in self.chat(conversations)]


class ServerSimulator(PromptedSimulator):
    """A model behind an OpenAI-compatible URL, greedy, many dialogues at once."""

    def __init__(self, server: ChatServer, template: str = HUMAN_PROMPT, pictures=None):
        super().__init__(template, pictures)
        self.server = server

    def complete(self, conversations):
        if self.pictures:
            conversations = [[m | {"content": list(map(server_part, m["content"]))} for m in c] for c in conversations]
        return [texts[0].text for texts in self.server.chat_many(conversations, temperature=0.0, max_tokens=1024)]


def server_part(part: dict) -> dict:
    """A picture as OpenAI's messages have it, in the address itself; a text as it is."""
    if part["type"] != "image":
        return part
    part["image"].save(file := io.BytesIO(), "PNG")
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"}}


class KeyboardSimulator:
    """The reader plays the human."""

    def reply(self, tasks: list[Task], dialogues: list[list[Message]]) -> list[str]:
        replies = []
        for task, dialogue in zip(tasks, dialogues, strict=True):
            if len(dialogue) == 2:
                print(f"\nYou want this, and asked: {task.problem_description}\n\n{task.ground_truth}\n")
            print(f"Agent: {dialogue[-1]['content']}")
            try:
                replies.append(input("You:   ") or "I don't know.")
            except EOFError:
                raise InputError("--simulator keyboard: the input ended before the dialogue did") from None
        return replies
