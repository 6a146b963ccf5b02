"""Humans, chat templates and sampling.  The server is a real one: http.server in a thread of this process."""

import contextlib
import gzip
import json
import re
import socket
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from transformers import GenerationConfig
from transformers.cache_utils import DynamicLayer

import simulator
import sweet_rl
from colbench import GOODBYE, UNKNOWN, Action, Failure, InputError, Task, miniature_code
from simulator import (
    ChatModel,
    ChatServer,
    KeyboardSimulator,
    LLMSimulator,
    PromptedSimulator,
    ScriptedSimulator,
    ServerAgent,
    ServerSimulator,
    chat_prompt,
    end_ids,
    text_ids,
    without_reasoning,
)

TASK = Task("write fee(x) for a taxi.", miniature_code({"rate": 3, "limit": 20}), {"test1": "fee(1)"})


def dialogue(*texts):
    """The request, then messages of the agent and of the human in turn."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate([TASK.problem_description, *texts])]


# ---------------------------------------------------------------------------------------------------------
# Scripted human
@pytest.mark.parametrize(
    "said, reply",
    [
        (["what is the rate?"], "the rate is 3."),
        (["tell me the limit please"], "the limit is 20."),
        (["what are the limit and the rate?"], "the rate is 3."),  # one question reveals one detail
        (["what are the limit and the rate?", "the rate is 3.", "what are the limit and the rate?"], "the limit is 20. that is all."),
        (["what is the rate?", "the rate is 3.", "what is the rate?"], UNKNOWN),  # told already
        (["what is the surcharge?"], UNKNOWN),
        (["how are you?"], UNKNOWN),
        ([""], UNKNOWN),
    ],
)
def test_a_scripted_human(said, reply):
    assert ScriptedSimulator().reply([TASK], [dialogue(*said)]) == [reply]


def test_patience_ends_with_one_useless_question_too_many():
    """Only useless questions count, wherever they stand; and the same dialogue always gets the same reply."""
    human = ScriptedSimulator()
    said, replies = ["what is the rate?"], []
    for i in range(10):
        replies += human.reply([TASK], [dialogue(*said)])
        assert human.reply([TASK], [dialogue(*said)]) == replies[-1:]
        said += [replies[-1], f"what is {i}?"]
    useless = human.patience - 1
    assert replies[: useless + 2] == ["the rate is 3."] + [UNKNOWN] * useless + [GOODBYE]
    asked = dialogue(*["what?", UNKNOWN] * useless, "what is the limit?")
    assert human.reply([TASK], [asked]) == ["the limit is 20."]


def test_a_scripted_human_knows_only_miniature_code():
    task = Task("write f", "def f(a):\n    return a + 1", {})
    assert ScriptedSimulator().reply([task], [dialogue("what is the rate?")]) == [UNKNOWN]


# ---------------------------------------------------------------------------------------------------------
# Keyboard
def test_the_keyboard(monkeypatch, capsys):
    lines = iter(["three", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    assert KeyboardSimulator().reply([TASK] * 2, [dialogue("rate?"), dialogue("a", "b", "limit?")]) == ["three", "I don't know."]
    shown = capsys.readouterr().out
    assert shown.count(TASK.ground_truth) == 1 and "rate?" in shown and "limit?" in shown


def test_the_keyboard_at_its_end(monkeypatch):
    def ended(prompt):
        raise EOFError

    monkeypatch.setattr("builtins.input", ended)
    with pytest.raises(InputError, match="keyboard"):
        KeyboardSimulator().reply([TASK], [dialogue("rate?")])


# ---------------------------------------------------------------------------------------------------------
# Humans played by a model
class Parrot(PromptedSimulator):
    """Says what it was given, and keeps its prompts."""

    def __init__(self, *texts, **more):
        super().__init__(**more)
        self.texts = texts

    def complete(self, conversations):
        self.prompts = [messages[0]["content"] for messages in conversations]
        return list(self.texts)


REPLIES = {  # what a model says: what the agent gets to read
    "It is three.": "It is three.",
    " \n x \n": "x",
    "": "I don't know.",
    "<think>the code says 3</think> Three.": "Three.",
    "<think>a\nb</think>One.<think>c</think> Two.": "One. Two.",
    "<think>never ends " + "x" * 500: "I don't know.",
    "<think></think>": "I don't know.",
    "<think>" + "t" * 500 + "</think>" + "x" * 500: "x" * 500,
    "the code says SENTINEL</think>Three.": "Three.",  # templates of reasoning models open the tag in the prompt
}


@pytest.mark.parametrize("said, reply", REPLIES.items(), ids=[text[:25] for text in REPLIES])
def test_what_is_relayed_of_a_reply(said, reply):
    assert Parrot(said).reply([TASK], [dialogue("what?")]) == [reply]


def test_reasoning_is_not_relayed_at_all():
    assert without_reasoning("a <think>b</think> c <think>d") == "a  c"


def test_the_humans_prompt():
    """Its three fields are filled in, any other brace is text, the raw output of the agent stays out of sight."""
    template = "P={problem_description} H={hidden_information} D={dialogue_history} {x} {{y}} {"
    task = Task("{hidden_information}", "return {dialogue_history}", {})
    turn = {"role": "assistant", "content": "seen {x}", "output": "SECRET OUTPUT: seen {x}", "input": "SECRET"}
    human = Parrot("ok", template=template)
    human.reply([task], [[{"role": "user", "content": "hi"}, turn]])
    filled = "P={hidden_information} H=return {dialogue_history} D=You: hi\nAssistant: seen {x} {x} {{y}} {"
    assert human.prompts == [filled]


def test_the_default_prompt_holds_all_three():
    human = Parrot("ok")
    human.reply([TASK], [dialogue("what is the rate?")])
    for part in (TASK.problem_description, TASK.ground_truth, "Assistant: what is the rate?"):
        assert part in human.prompts[0]
    assert "{" not in human.prompts[0]


def test_the_agents_own_model_can_be_the_human(model, tokenizer):
    human = LLMSimulator(model, tokenizer, batch_size=2)
    human.chat.max_new_tokens = 12
    dialogues = [dialogue("what?"), dialogue("what is the rate?", "no", "and the limit?"), dialogue("")]
    replies = human.reply([TASK] * 3, dialogues)
    assert len(replies) == 3 and all(replies)
    assert replies == [human.reply([TASK], [one])[0] for one in dialogues]  # greedy, alone as in a batch


# ---------------------------------------------------------------------------------------------------------
# Server
@contextlib.contextmanager
def server(answer, models={"data": [{"id": "first"}, {"id": "second"}]}):
    """A server that sends `answer(body, number of the request)`; yields (url, requests).

    What is sent is (status, text, headers), an object, or whatever a function of the handler does.
    """
    requests, lock = [], threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send(200, json.dumps(models))

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                requests.append({"path": self.path, "body": body, "key": self.headers.get("Authorization")})
                number = len(requests)
            sent = answer(body, number)
            if callable(sent):
                with contextlib.suppress(OSError):  # the other side has had enough
                    sent(self)
            else:
                self.send(*sent) if isinstance(sent, tuple) else self.send(200, json.dumps(sent))

        def send(self, status, text, headers={}):
            self.send_response(status)
            self.send_header("Content-Length", str(len(text.encode())))
            for header in headers.items():
                self.send_header(*header)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{http.server_port}/v1", requests
    finally:
        http.shutdown()
        http.server_close()


def choice(text, reason="stop"):
    return {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": reason}]}


@pytest.fixture
def naps(monkeypatch):
    """Nobody really waits; the seconds that would have been waited."""
    seconds = []
    monkeypatch.setattr(simulator.time, "sleep", seconds.append)
    return seconds


def test_a_server_as_human():
    with server(lambda body, _: choice("x")) as (url, requests):
        human = ServerSimulator(ChatServer(url + "/"))
        assert human.reply([TASK], [dialogue("what?")]) == ["x"]
    body = requests[0]["body"]
    assert requests[0]["path"] == "/v1/chat/completions" and requests[0]["key"] is None
    assert body["model"] == "first" and body["temperature"] == 0 and body["n"] == 1 and body["max_tokens"] > 0
    assert len(body["messages"]) == 1 and TASK.ground_truth in body["messages"][0]["content"]


@pytest.mark.parametrize("said, reply", [(None, "I don't know."), ("", "I don't know."), ("<think>3</think>Three.", "Three.")])
def test_what_a_server_says_is_never_none(said, reply):
    with server(lambda body, _: choice(said)) as (url, _):
        assert ServerSimulator(ChatServer(url)).reply([TASK], [dialogue("what?")]) == [reply]


def test_many_dialogues_at_once_come_back_in_order():
    """All eight have to arrive before the first is answered, and the last to arrive is answered first."""
    together = threading.Barrier(8)

    def answer(body, number):
        together.wait(10)
        return choice(body["messages"][0]["content"].split("Assistant: ")[1][:9])

    with server(answer) as (url, _):
        human = ServerSimulator(ChatServer(url, parallel=8))
        replies = human.reply([TASK] * 8, [dialogue(f"question{i}") for i in range(8)])
    assert replies == [f"question{i}" for i in range(8)]


@pytest.mark.parametrize("failure", [(500, "oops"), (503, ""), (429, "slow down"), (200, "<html>no json")], ids=str)
def test_a_failure_then_success(naps, failure):
    with server(lambda body, number: failure if number < 3 else choice("yes")) as (url, requests):
        assert ServerSimulator(ChatServer(url)).reply([TASK], [dialogue("what?")]) == ["yes"]
    assert len(requests) == 3 and len(naps) == 2 and naps[0] < naps[1]


@pytest.mark.parametrize("status, asked", [(500, 4), (404, 1), (401, 1)])
def test_a_server_that_goes_on_failing(naps, status, asked):
    with server(lambda body, _: (status, "what\nis " + "long " * 1000)) as (url, requests):
        (reply,) = ServerSimulator(ChatServer(url)).reply([TASK], [dialogue("what?")])
    assert isinstance(reply, Failure) and len(requests) == asked
    assert str(status) in reply and "\n" not in reply and len(reply) < 400


NO_COMPLETIONS = [{}, [], "hello", {"choices": None}, {"choices": []}, {"choices": [{}]}, {"choices": [{"message": None}]}]
NO_COMPLETIONS += [{"choices": [{"message": {"content": [{"type": "text", "text": "hi"}]}}]}, {"choices": ["hi"]}, None]


@pytest.mark.parametrize("sent", NO_COMPLETIONS, ids=str)
def test_json_that_is_no_completion(naps, sent):
    with server(lambda body, _: sent) as (url, _):
        (reply,) = ServerSimulator(ChatServer(url)).reply([TASK], [dialogue("what?")])
    assert isinstance(reply, Failure) and "expected 1 choices[].message.content" in reply


@pytest.mark.parametrize("models", [{}, [], {"data": []}, {"data": None}, {"data": [{}]}], ids=str)
def test_a_server_without_models(naps, models):
    with server(lambda body, _: choice("x"), models) as (url, _):
        with pytest.raises(InputError) as caught:
            ChatServer(url)
        assert ChatServer(url, "named").model == "named" and url in str(caught.value)


def test_a_dead_server_is_an_input_error(naps):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, not listening: a connection is refused
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
        with pytest.raises(InputError, match="does not answer"):
            ChatServer(url)
    assert 0 < len(naps) and sum(naps) < 30


def test_a_server_that_never_answers_is_given_up():
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel accepts, nobody reads
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        start = time.monotonic()
        with pytest.raises(InputError, match="no whole answer in 0.2 s|Timeout"):
            ChatServer(url, timeout=0.2, attempts=2)
        assert time.monotonic() - start < 20  # not forever


@pytest.mark.parametrize("url", ["http://", "http://me:sk-SENTINEL@host/v1", "http://host/v1?key=sk-SENTINEL"])
def test_an_address_that_is_none_or_holds_a_key(url):
    """It would be written to settings.json."""
    with pytest.raises(InputError, match="http://localhost:8000/v1.*OPENAI_API_KEY") as caught:
        ChatServer(url)
    assert "SENTINEL" not in str(caught.value)


def test_the_key_is_sent_and_never_printed(monkeypatch, capsys, naps):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-SENTINEL")

    def answer(body, number):
        return choice("yes") if number == 1 else (401, "no such key: sk-SENTINEL")  # as some servers answer

    with server(answer) as (url, requests):
        human = ServerSimulator(ChatServer(url))
        assert human.reply([TASK], [dialogue("what?")]) == ["yes"]
        (reply,) = human.reply([TASK], [dialogue("what?")])
    assert [request["key"] for request in requests] == ["Bearer sk-SENTINEL"] * 2
    printed = capsys.readouterr()
    assert isinstance(reply, Failure) and "SENTINEL" not in reply + printed.out + printed.err


def sends(*parts, pause=0.0):
    """Bytes, one part after the other; the connection ends behind the last."""

    def send(handler):
        for part in parts:
            threading.Event().wait(pause)
            handler.wfile.write(part)

    return send


def framed(data: bytes, *headers: bytes):
    return sends(b"\r\n".join([b"HTTP/1.1 200 OK", *headers, b"", data]))


YES = json.dumps(choice("yes")).encode()
REASONED = {"choices": [{"message": {"content": "yes", "reasoning_content": "hm"}, "finish_reason": "stop"}]}
FAULTS = {  # name: what is sent, and the reply or a word of the Failure
    "reasoned": (REASONED, "yes"),
    "chunked": (framed(b"5\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (YES[:5], len(YES) - 5, YES[5:]), b"Transfer-Encoding: chunked"), "yes"),
    "packed": (framed(gzip.compress(YES), b"Content-Encoding: gzip"), "yes"),
    "context length": ((400, '{"error": {"code": "context_length_exceeded"}}'), "context_length_exceeded"),
    "busy": ((429, "", {"Retry-After": "2"}), "429"),
    "busy for centuries": ((429, "", {"Retry-After": "9" * 400}), "429"),
    "busy till a day": ((503, "", {"Retry-After": "Wed, 21 Oct 2099 07:28:00 GMT"}), "503"),
    "closes": (sends(), "ConnectionError"),
    "no HTTP": (sends(b"hello\r\n\r\n"), "ConnectionError"),
    "half a JSON": ((200, YES.decode()[:30]), "JSONDecodeError"),
    "half of what was promised": (framed(YES[:30], b"Content-Length: 999"), "JSONDecodeError|IncompleteRead|ProtocolError"),
    "half packed": (framed(b"no gzip", b"Content-Encoding: gzip"), "DecodeError"),
    "no end": (sends(b"HTTP/1.1 200 OK\r\n\r\n", *[b" " * (1 << 20)] * 40), "JSONDecodeError|no whole answer"),
    "somewhere else": ((307, "", {"Location": "/v1/chat/completions"}), "status 307"),
    "never": (sends(b"", pause=3), "no whole answer|Timeout"),
    "a byte at a time": (sends(b"HTTP/1.1 200 OK\r\n\r\n", *[b"x"] * 60, pause=0.05), "no whole answer"),
    "the head, a byte at a time": (sends(*[b"H"] * 60, pause=0.05), "no whole answer"),
}


@pytest.mark.parametrize("sent, said", FAULTS.values(), ids=FAULTS)
def test_whatever_a_server_does_there_is_an_end(naps, sent, said):
    with server(lambda body, _: sent) as (url, requests):
        (reply,) = ServerSimulator(ChatServer(url, timeout=0.7)).reply([TASK], [dialogue("what?")])
    assert re.search(said, reply) and isinstance(reply, Failure) == (reply != "yes")
    assert len(requests) <= 4 and all(nap <= 0.7 for nap in naps)  # never longer than is left


def test_a_server_says_when_to_ask_again(naps):
    waits = iter(["7", "9999", "soon", ""])
    with server(lambda body, _: (429, "", {"Retry-After": next(waits)})) as (url, _):
        ServerSimulator(ChatServer(url)).reply([TASK], [dialogue("what?")])
    assert naps == [7, simulator.LONGEST_WAIT, 2]


def test_a_failed_conversation_ends_no_other_and_many_in_a_row_end_all(naps):
    def answer(body, _):
        return (400, "too long") if "odd" in body["messages"][0]["content"] else choice("yes")

    with server(answer) as (url, requests):
        human = ServerSimulator(ChatServer(url, parallel=2))
        replies = human.reply([TASK] * 9, [dialogue("odd" if i % 2 else "even") for i in range(9)])
        assert [isinstance(reply, Failure) for reply in replies] == [i % 2 == 1 for i in range(9)]
        before = len(requests)
        replies = human.reply([TASK] * 50, [dialogue("odd")] * 50)
    assert len(requests) - before <= 8 and "given up" in replies[-1] and all(isinstance(reply, Failure) for reply in replies)


def test_a_cut_completion_is_marked():
    with server(lambda body, _: choice("x", "length" if body["max_tokens"] == 1 else "stop")) as (url, _):
        chat = ChatServer(url).chat
        assert chat([], 0.0, 1) == [Action("x", "", True)] and chat([], 0.0, 9) == [Action("x", "", False)]


def numbered(count):
    """An answer of so many choices, of which no two in a test are alike."""
    return lambda number: {"choices": [choice(f"{number}.{i}")["choices"][0] for i in range(count)]}


SENDS = {  # name: what is sent of n choices, and the n of each request for 5 actions
    "all": (lambda n: numbered(n), [5]),
    "more than asked for": (lambda n: numbered(n + 2), [5]),
    "at most two": (lambda n: numbered(min(n, 2)), [5, 3, 1]),
    "one": (lambda n: numbered(1), [5, 4, 3, 2, 1]),
    "refuses several": (lambda n: numbered(1) if n == 1 else lambda _: (400, "n > 1"), [5, 1, 1, 1, 1, 1]),
    "breaks several": (lambda n: numbered(1) if n == 1 else lambda _: (500, "n > 1"), [5] * 4 + [1] * 5),
    "at most two, then refuses": (lambda n: numbered(n) if n < 3 else lambda _: (400, "n > 2"), [5, 1, 1, 1, 1, 1]),
}


@pytest.mark.parametrize("send, asked", SENDS.values(), ids=SENDS)
def test_candidates_of_a_server_are_as_many_as_wanted(naps, send, asked):
    with server(lambda body, number: send(body["n"])(number)) as (url, requests):
        (actions,) = ServerAgent(ChatServer(url), "be brief").sample([dialogue()], 5)
    assert [request["body"]["n"] for request in requests] == asked
    assert len({action.text for action in actions}) == len(actions) == 5


def test_a_server_as_agent():
    """It reads the system prompt and what was seen of a dialogue, and nothing else of it."""
    with server(lambda body, _: choice("what?", "length" if body["temperature"] else "stop")) as (url, requests):
        agent = ServerAgent(ChatServer(url, "named"), "be brief", 1.0, 7)
        history = [*dialogue(), {"role": "assistant", "content": "seen", "output": "SECRET OUTPUT: seen", "input": "SECRET"}]
        assert agent([history]) == [Action("what?", "", True)]
        agent.temperature = 0.0
        assert agent([history] * 2) == [Action("what?")] * 2
    messages = [{"role": "system", "content": "be brief"}, *dialogue(), {"role": "assistant", "content": "seen"}]
    assert requests[0]["body"] == {"model": "named", "messages": messages, "temperature": 1.0, "max_tokens": 7, "n": 1}


def test_one_history_that_fails_costs_no_other_its_candidates():
    def answer(body, number):
        return (400, "too long") if body["messages"][-1]["content"] == "odd" else numbered(3)(number)

    with server(answer) as (url, _):
        samples = ServerAgent(ChatServer(url), "").sample([dialogue(), dialogue("a", "odd"), dialogue()], 3)
    assert [[isinstance(action.text, Failure) for action in actions] for actions in samples] == [[False] * 3, [True] * 3, [False] * 3]


# ---------------------------------------------------------------------------------------------------------
# Chat templates
PLAIN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
TEMPLATES = {
    "plain": PLAIN,
    "refuses a system message": "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + PLAIN,
    "drops a system message": "{% set messages = messages | rejectattr('role', 'equalto', 'system') | list %}" + PLAIN,
}
# What Llama 3 does: a BOS token first, the system part always there with today's date, trimmed contents.
LLAMA3 = (
    "<|pad|><|system|>Today: {{ date_string if date_string is defined else strftime_now('%d %b %Y') }}\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% set messages = messages[1:] %}{% endif %}<|end|>"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SYSTEM = [{"role": "system", "content": "be brief"}]
TALK = dialogue("what?", "three")


def templated(template):
    tokenizer = sweet_rl.tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def test_a_plain_prompt(tokenizer):
    assert chat_prompt(tokenizer, SYSTEM + dialogue("a")) == (
        "<|system|>be brief<|end|><|user|>write fee(x) for a taxi.<|end|><|assistant|>a<|end|><|assistant|>"
    )


@pytest.mark.parametrize("name", list(TEMPLATES)[1:])
def test_without_a_system_role_it_goes_into_the_first_user_message(name):
    tokenizer = templated(TEMPLATES[name])
    folded = [{"role": "user", "content": "be brief\n\nwrite fee(x) for a taxi."}, *TALK[1:]]
    assert chat_prompt(tokenizer, SYSTEM + TALK) == chat_prompt(templated(PLAIN), folded)
    assert chat_prompt(tokenizer, TALK) == chat_prompt(templated(PLAIN), TALK)
    assert SYSTEM == [{"role": "system", "content": "be brief"}] and TALK[0]["content"] == TASK.problem_description


def test_one_begin_token_and_it_is_first():
    """Also with the critic's hint in front, and though the tokenizer itself would add one more."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = templated(LLAMA3)
    begin = tokenizer.convert_tokens_to_ids("<|pad|>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<|pad|> $A", special_tokens=[("<|pad|>", begin)])
    assert tokenizer("a")["input_ids"][0] == begin
    encoder = sweet_rl.Encoder(tokenizer, [tokenizer.eos_token_id])
    for ids in (
        text_ids(tokenizer, chat_prompt(tokenizer, SYSTEM + TALK)),
        encoder.prompt(SYSTEM + TALK, TASK.ground_truth),
        *encoder.dialogue(SYSTEM + TALK).prompts,
    ):
        assert ids[0] == begin and ids.count(begin) == 1


def test_a_prompt_is_the_same_tomorrow():
    tokenizer = templated(LLAMA3)
    assert "26 Jul 2024" in chat_prompt(tokenizer, SYSTEM + TALK)


def test_a_prompt_shows_nothing_but_what_was_seen(tokenizer):
    turn = {"role": "assistant", "content": "seen", "output": "SECRET OUTPUT: seen", "input": "SECRET"}
    assert "SECRET" not in chat_prompt(tokenizer, [TALK[0], turn])


def test_half_a_character_has_ids_too(tokenizer):
    """A server that cuts its reply inside an emoji sends half of a surrogate pair, as JSON allows."""
    assert text_ids(tokenizer, "yes " + json.loads('"\\ud83d"'))[:4] == text_ids(tokenizer, "yes ")


# ---------------------------------------------------------------------------------------------------------
# ChatModel
HISTORIES = [dialogue(), dialogue("what is the rate?", "the rate is 3."), dialogue("a", "b", "c", "d")]


def texts(samples):
    return [[action.text for action in actions] for actions in samples]


@pytest.fixture
def chat(model, tokenizer):
    return ChatModel(model, tokenizer, "ask, then answer.", temperature=0.0, max_new_tokens=16)


def slow_greedy(chat, history, ends):
    """Token by token, the whole sequence again for each."""
    prompt = chat_prompt(chat.tokenizer, [{"role": "system", "content": chat.system}, *history])
    ids = text_ids(chat.tokenizer, prompt)
    said = []
    while len(said) < chat.max_new_tokens:
        with torch.no_grad():
            token = chat.model(torch.tensor([ids + said])).logits[0, -1].argmax().item()
        if token in ends:
            break
        said.append(token)
    return said


def test_greedy_text_alone_in_a_batch_and_by_hand(chat):
    alone = [chat([history])[0].text for history in HISTORIES]
    ends = [chat.tokenizer.eos_token_id]
    by_hand = [chat.tokenizer.decode(slow_greedy(chat, history, ends), skip_special_tokens=True) for history in HISTORIES]
    assert alone == by_hand and len(set(alone)) > 1
    assert [action.text for action in chat(HISTORIES)] == alone  # one batch, padded on the left
    chat.batch_size = 2
    assert [action.text for action in chat(HISTORIES)] == alone  # two batches, order kept


@pytest.mark.parametrize("batch_size", [1, 6, 64])
def test_greedy_samples_with_a_shared_prefill(chat, batch_size):
    alone = [[action.text] * 3 for action in chat(HISTORIES)]
    chat.batch_size = batch_size
    assert texts(chat.sample(HISTORIES, 3)) == alone


def test_a_cache_with_room_holds_what_a_plain_one_does_and_is_seldom_copied(chat, monkeypatch):
    monkeypatch.setattr(simulator.RoomyLayer, "room", 3)
    batch = texts(chat.sample(HISTORIES, 3))
    assert batch == [[action.text] * 3 for action in chat(HISTORIES)]
    plain, new = DynamicLayer(), torch.randn(8, 2, 4, 1, 5)  # (steps, B, heads, tokens, D)
    plain.update(new[0], -new[0])
    roomy, places = simulator.RoomyLayer(plain.keys, plain.values), set()
    for keys in new[1:]:
        for found, wanted in zip(roomy.update(keys, -keys), plain.update(keys, -keys), strict=True):
            assert torch.equal(found, wanted) and roomy.get_seq_length() == plain.get_seq_length()
        places.add(roomy.keys.data_ptr())
    assert len(places) == 2  # seven tokens, room for four at a time


def test_shared_and_plain_samples_have_the_models_distribution(chat):
    """The first tokens of 3,000 samples, drawn either way, against the probabilities themselves."""
    chat.temperature, chat.max_new_tokens, chat.batch_size = 1.0, 1, 3000
    prompt = chat_prompt(chat.tokenizer, [{"role": "system", "content": chat.system}, *HISTORIES[1]])
    with torch.no_grad():
        probabilities = chat.model(torch.tensor([text_ids(chat.tokenizer, prompt)])).logits[0, -1].softmax(-1)
    wanted = Counter()
    for token, p in enumerate(probabilities.tolist()):  # several tokens can be the same text
        wanted[chat.tokenizer.decode([token], skip_special_tokens=True)] += p
    torch.manual_seed(0)
    shared = chat.sample([HISTORIES[0], HISTORIES[1]], 1500)[1] + chat.sample([HISTORIES[1]], 1500)[0]
    plain = chat([HISTORIES[1]] * 3000)
    for samples in (shared, plain):
        found = Counter(action.text for action in samples)
        for text, p in wanted.most_common(8):
            assert abs(found[text] / 3000 - p) < 4.5 * (p * (1 - p) / 3000) ** 0.5
    assert len(found) > 20  # a distribution with a tail that top_k or top_p would cut


def test_any_of_several_end_tokens_ends_and_nothing_is_kept_after(chat, monkeypatch):
    """A token that comes up early is made a second end token: what came before it is left, and nothing is wasted."""
    lengths, generate = [], chat.model.generate

    def counted(ids, **given):
        generated = generate(ids, **given)
        lengths.append(generated.shape[1] - ids.shape[1])
        return generated

    monkeypatch.setattr(chat.model, "generate", counted)
    history = HISTORIES[1]
    said = slow_greedy(chat, history, [])
    early = next(i for i, token in enumerate(said) if token not in said[:i] and i >= 1)
    ends = [chat.tokenizer.eos_token_id, said[early], next(token for token in range(60) if token not in said)]
    chat.model.generation_config.eos_token_id = ends
    several = ChatModel(chat.model, chat.tokenizer, chat.system, 0.0, 16)
    assert several.ends == sorted(ends) and several.ends[0] != said[early]
    wanted = Action(chat.tokenizer.decode(said[:early], skip_special_tokens=True))
    for action in [several([history])[0], several(HISTORIES)[1], several.sample(HISTORIES, 2)[1][1]]:
        assert (action.text, action.truncated) == (wanted.text, False)
    assert lengths[0] == early + 1


@pytest.mark.parametrize(
    "tokens, text, truncated",
    [
        ([10, 11], "ab", True),
        ([10, 11, 1], "ab", False),
        ([10, 2, 11, 12], "a", False),
        ([1, 1, 1], "", False),
        ([], "", True),
        ([10, 1, 1, 2], "a", False),
    ],
)
def test_the_end_of_an_action(chat, tokens, text, truncated):
    names = {10: "a", 11: "b", 12: "c", 1: "<|end|>", 2: "<|pad|>"}
    ids = [chat.tokenizer.convert_tokens_to_ids(names[token]) for token in tokens]
    chat.ends = [chat.tokenizer.convert_tokens_to_ids(name) for name in ("<|end|>", "<|pad|>")]
    assert chat.action("p", ids) == Action(text, "p", truncated)


def test_end_ids(model, tokenizer):
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    for configured, wanted in ((None, [end]), (end, [end]), (pad, sorted([pad, end])), ([pad, end], sorted([pad, end]))):
        model.generation_config.eos_token_id = configured
        assert end_ids(model, tokenizer) == wanted


def test_the_length_limit_marks_a_message_as_cut(chat):
    """A model that says "a" for ever is cut; one that ends at once is not, not even at a limit of one token."""
    def always(token):
        head = torch.nn.Linear(64, len(chat.tokenizer), bias=True)
        torch.nn.init.zeros_(head.weight), torch.nn.init.zeros_(head.bias)
        head.bias.data[token] = 50.0
        chat.model.lm_head = head

    always(chat.tokenizer.convert_tokens_to_ids("a"))
    assert [(a.text, a.truncated) for a in chat(HISTORIES)] == [("a" * 16, True)] * 3
    always(chat.tokenizer.eos_token_id)
    for chat.max_new_tokens in (1, 16):
        assert [(a.text, a.truncated) for a in chat.sample(HISTORIES, 2)[0]] == [("", False)] * 2


def test_pad_may_be_the_end_token(model):
    """pad == eos, as with most base models: the same text, alone and in a batch."""
    tokenizer = sweet_rl.tiny_tokenizer()
    before = [action.text for action in ChatModel(model, tokenizer, "", 0.0, 16)(HISTORIES)]
    tokenizer.pad_token = tokenizer.eos_token
    assert [action.text for action in ChatModel(model, tokenizer, "", 0.0, 16)(HISTORIES)] == before


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "own",
    [
        {"do_sample": True, "temperature": 0.01, "top_p": 0.01, "top_k": 1},
        {"repetition_penalty": 5.0},
        {"no_repeat_ngram_size": 1},
        {"do_sample": True, "min_p": 0.9},
        {"max_length": 3},
        {"suppress_tokens": list(range(0, 500))},
    ],
    ids=lambda own: ",".join(own),
)
def test_the_models_own_generation_settings_are_not_taken_over(chat, own, temperature):
    """Log-probs are scored under the plain distribution, so that is what has to be sampled from."""
    chat.temperature = temperature

    def said():
        torch.manual_seed(0)
        return texts([chat(HISTORIES), *chat.sample(HISTORIES, 2)])

    before = said()
    chat.model.generation_config = GenerationConfig(eos_token_id=chat.tokenizer.eos_token_id, **own)
    assert said() == before
    assert chat.model.generation_config.to_diff_dict().items() >= own.items()  # and they are left as they were


def test_an_actions_prompt_is_what_it_was_sampled_from(chat):
    wanted = [chat_prompt(chat.tokenizer, [{"role": "system", "content": chat.system}, *history]) for history in HISTORIES]
    assert [action.prompt for action in chat(HISTORIES)] == wanted
    chat.system = ""
    assert "<|system|>" not in chat(HISTORIES)[0].prompt
