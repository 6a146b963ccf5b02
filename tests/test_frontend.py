"""Frontend Design: pages, their pictures, and the humans that see them; against the real browser."""

import base64
import contextlib
import copy
import dataclasses
import functools
import http.server
import io
import json
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
import tokenizers
import torch
import transformers

Image = pytest.importorskip("PIL.Image", reason="frontend design needs pillow")

import colbench
import sweet_rl
from colbench import FRONTEND_HUMAN_PROMPT, InputError, Task, page_in, render
from colbench import clip_embedding, cosine_rewards, pixel_embedding, websight_tasks
from simulator import ChatServer, LLMSimulator, ScriptedDesigner, SeeingChatModel, ServerSimulator, chat_prompt, page_pictures
from test_simulator import server

ROOT = Path(__file__).resolve().parent.parent
GREEN = "<html><body style='background:#00ff00'>{}</body></html>"


@pytest.fixture(scope="module")
def browser():
    try:
        render([GREEN.format("is there a browser?")])
    except InputError as error:
        pytest.skip(f"no browser: {error}")


@pytest.fixture
def neighbour():
    """A web server on this machine that pages try to reach; what it was asked for is in `asked`."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()

        do_POST = do_GET

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        server.asked = asked
        yield server
        server.shutdown()


def colour(picture, x=-10, y=-10):
    return picture.convert("RGB").getpixel((x % picture.width, y % picture.height))


# ------------------------------------------------------------------------------------------ the page in a text
@pytest.mark.parametrize(
    "text, page",
    [
        ("no page at all", None),
        ("page.html", None),
        ("", None),
        ("a thought\nOUTPUT: <html>\n<p>1\n</html> so.", "<html>\n<p>1\n</html>"),
        ("<!DOCTYPE html>\n<HTML lang=en><p>1</HTML >", "<HTML lang=en><p>1</HTML >"),
        ("```html\n<html>1</html>\n```", "<html>1</html>"),
        ("<html>1</html> or better <html>2</html>", "<html>2</html>"),
        ("I will write one <html> page: <html>1</html>", "<html>1</html>"),
        ("<body class='x'>1</body>", "<body class='x'>1</body>"),
        ("<html>1</html> then <body>2</body>", "<html>1</html>"),
        ("<html>1</html> then <html><p>cut", "<html>1</html>"),
        ("<html><body>1</body>", "<body>1</body>"),
        ("<html><p>cut", None),
        ("<htmlx>1</html>", None),
    ],
)
def test_the_last_whole_page_is_taken(text, page):
    assert page_in(text) == page


@pytest.mark.parametrize(
    "address, ours",
    [
        ("https://picsum.photos/id/48/300/200", "300/200"),
        ("https://picsum.photos/id/7/300/200-learning", "300/200"),
        ("https://source.unsplash.com/random/1600x900/?food", "1600/900"),
        ("//via.placeholder.com/150", "150/150"),
        ("http://images.example/photo-15-a9?w=640&amp;h=480&q=80", "640/480"),
        ("https://example.com/logo.png", None),
        ("logo-300x200.png", None),
    ],
)
def test_pictures_with_a_size_are_picture_48(address, ours):
    page = '<html><img src="{0}" alt="{0}"><a href="{0}"><p style="background:url(\'{0}\')"></html>'
    expected = f"https://picsum.photos/id/48/{ours}" if ours else address
    fixed = page.replace('alt="{0}"', f'alt="{address}"').replace('href="{0}"', f'href="{address}"')
    assert page_in(page.format(address)) == fixed.format(expected)


# ------------------------------------------------------------------------------------------ screenshots
def test_pages_are_drawn_whole_and_in_order(browser):
    tall = "<html><body style='margin:0;background:#0000ff'><p style='height:{}px'></body></html>"
    pictures = render([GREEN.format(""), tall.format(3000), None, "", tall.format(10**6), GREEN.format("")])
    assert [colour(p) for p in pictures] == [(0, 255, 0), (0, 0, 255), (0, 0, 0), (0, 0, 0), (0, 0, 255), (0, 255, 0)]
    assert pictures[0].size == pictures[2].size == (1280, 720)
    assert 3000 < pictures[1].height < 3100 and pictures[4].height == 8000


def test_scripts_run_and_leave_nothing_behind(browser):
    script = "<script>let shade = '{0}'; document.body.style.background = shade; setInterval(() => "
    script += "document.body.style.background = shade, 1); localStorage</script>"
    pictures = render([GREEN.format(script.format(name)) for name in ("red", "blue")] + [GREEN.format("plain")])
    assert [colour(p) for p in pictures] == [(255, 0, 0), (0, 0, 255), (0, 255, 0)]


def test_what_a_page_needs_is_served_here(browser, tmp_path):
    (tmp_path / "style.css").write_text(".bg-red-500 { background: #ff0000 }")
    link = f'<link href="{colbench.STYLESHEET_URL}" rel="stylesheet">'
    page = f'<html>{link}<body class="bg-red-500"><img src="https://picsum.photos/id/48/900/400"></body></html>'
    (picture,) = render([page], str(tmp_path / "style.css"))
    drawn = Image.open(io.BytesIO(colbench.picture_of_size(900, 400)))
    assert colour(picture) == (255, 0, 0)
    assert colour(picture, 458, 208) == drawn.getpixel((450, 200))
    (tmp_path / "style.css").unlink()
    with pytest.raises(InputError, match="style.css cannot be had"):
        render([page.replace("900", "901")], str(tmp_path / "style.css"))


def test_a_machine_without_network_is_told_how(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(colbench, "STYLESHEET_URL", "http://127.0.0.1:9/x.css")
    with pytest.raises(InputError, match=r"x.css cannot be had .*--stylesheet FILE"):
        render([f'<html><link href="https://x.org/{colbench.STYLESHEET}" rel="stylesheet"></html>'])


def test_no_page_reaches_the_network_or_a_file(browser, neighbour, tmp_path):
    svg = "<svg xmlns='http://www.w3.org/2000/svg'><rect fill='red' width='99' height='99'/></svg>"
    (tmp_path / "secret.svg").write_text(svg)
    here, file = f"127.0.0.1:{neighbour.server_port}", f"file://{tmp_path}/secret.svg"
    wild = [
        f"<img src='{file}'><iframe src='{file}'></iframe><object data='{file}'></object>",
        f"<script>location = '{file}'</script>",
        f"<script>location = 'http://{here}/location'</script>",
        f"<meta http-equiv=refresh content='0;url=http://{here}/refresh'>",
        f"<img src='http://{here}/img'><iframe src='http://{here}/frame'></iframe><embed src='http://{here}/embed'>",
        f"<link rel=preconnect href='http://{here}/'><link rel=prefetch href='http://{here}/prefetch'>",
        f"<script>new WebSocket('ws://{here}/socket'); fetch('http://{here}/fetch'); "
        f"navigator.sendBeacon('http://{here}/beacon'); new EventSource('http://{here}/events')</script>",
        f"<script>for (let i = 0; i < 9; i++) open('http://{here}/window')</script>",
        f"<form id=f action='http://{here}/form' method=post></form><script>f.submit()</script>",
        f"<script>new Worker(URL.createObjectURL(new Blob([\"fetch('http://{here}/worker')\"])))</script>",
        "<script>alert(1); confirm(2); prompt(3); print()</script>",
    ]
    pictures = render([GREEN.format(page) for page in wild])
    assert neighbour.asked == []
    for picture in pictures:
        assert not (np.asarray(picture.convert("RGB")) == (255, 0, 0)).all(axis=-1).any()
    assert colour(pictures[-1]) == (0, 255, 0)


def test_a_page_that_does_not_end_is_black_and_the_next_is_fine(browser, monkeypatch):
    monkeypatch.setattr(colbench, "PAGE_SECONDS", 3)
    endless = "while (1) alert()", "setTimeout(() => { while (1); }, 0)"
    pages = [GREEN.format(text) for script in endless for text in (f"<script>{script}</script>", script)]
    assert [colour(picture) for picture in render(pages)] == [(0, 0, 0), (0, 255, 0)] * 2


def test_half_a_surrogate_pair_is_drawn(browser):
    assert colour(render([GREEN.format("\ud83d")])[0]) == (0, 255, 0)


def test_a_picture_is_the_same_every_time(browser, monkeypatch):
    page = GREEN.format("<img src='https://picsum.photos/id/48/300/200'><p>text<button>press</button><script>1</script>")
    first = render([page])[0].tobytes()
    monkeypatch.setattr(colbench, "screenshots", {})
    assert render([page])[0].tobytes() == first


def test_each_page_is_drawn_once_and_not_kept_for_ever(monkeypatch):
    browser = MagicMock()
    monkeypatch.setattr(colbench, "screenshots", {})
    monkeypatch.setattr(colbench, "KNOWN_PAGES", 2)
    monkeypatch.setattr(colbench, "Browser", lambda stylesheet: contextlib.nullcontext(browser))
    browser.screenshot.return_value = None
    for pages in ("<a>", "<b>", "<a>"), ("<b>", "<c>", "<c>"), ("<a>",), ("", None):
        render(list(pages))
    assert [call.args[0] for call in browser.screenshot.call_args_list] == ["<a>", "<b>", "<c>", "<a>"]


def processes_below(pid):
    """All descendants of a process: {pid: command line}; one that has ended has none, and is not counted."""
    parents, found, commands = {}, [pid], {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            commands[int(folder.name)] = (folder / "cmdline").read_bytes()
    for parent in found:
        found += [child for child in parents if parents[child] == parent]
    return {child: commands[child] for child in found[1:] if commands.get(child)}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_no_browser_outlives_us(browser, end):
    program = "import colbench; colbench.render(['<html><script>while (1);</script></html>'])"
    heard = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # which a shell turns off behind an "&"
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stderr=subprocess.DEVNULL, preexec_fn=heard)
    deadline = time.monotonic() + 30
    below = {}
    while b"--type=renderer" not in b" ".join(below.values()):
        below = processes_below(process.pid)
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(end)
    assert process.wait(30) != 0
    while any(Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes() for pid in below):
        assert time.monotonic() < deadline + 10
        time.sleep(0.1)


# ------------------------------------------------------------------------------------------ rewards
def plain_page(header="#cc2222", button="#2222cc", text="#000000", align="left", picture=True):
    picture = "<img src='https://picsum.photos/id/48/300/200'>" if picture else ""
    return f"""<html><body style="color:{text};text-align:{align}"><h1 style="background:{header}">A page</h1>
    <p>Words.</p>{picture}<button style="background:{button}">Press here</button></body></html>"""


def test_more_wrong_choices_are_a_lower_reward(browser):
    one = [plain_page(button="#22cc22"), plain_page(header="#22cc22"), plain_page(align="center"), plain_page(picture=False)]
    three = plain_page(header="#2222cc", button="#cccc22", align="center")
    pages = [plain_page(), *one, three, None, ""]
    right, *wrong, worst, none, empty = cosine_rewards([Task("a page", plain_page())] * len(pages), pages, pixel_embedding)
    assert right == 1.0
    assert all(worst + 0.05 < reward < 0.96 for reward in wrong)
    assert none == empty < worst - 0.3


def test_rewards_are_cosines_and_embed_sees_each_page_once(browser):
    seen = []

    def mean_colour(pictures):
        seen.extend(pictures)
        return np.stack([np.asarray(p.convert("RGB")).mean((0, 1)) + 1e-9 for p in pictures])

    red, green, yellow = (GREEN.replace("#00ff00", name).format("") for name in ("#f00", "#0f0", "#ff0"))
    rewards = cosine_rewards([Task("", red)] * 4, [red, green, yellow, None], mean_colour)
    assert rewards == pytest.approx([1.0, 0.0, 0.5**0.5, 3**-0.5], abs=1e-6) and len(seen) == 4


def test_grey_and_transparent_pictures_are_accepted():
    pictures = [Image.new(mode, (40, 90)) for mode in ("L", "RGBA", "RGB", "P")]
    vectors = pixel_embedding(pictures)
    assert (vectors == vectors[0]).all()


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """A folder with a tiny random CLIP, as the hub has the real one."""
    folder = str(tmp_path_factory.mktemp("clip"))
    torch.manual_seed(0)
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 32}
    text = {**vision, "vocab_size": 99, "max_position_embeddings": 8}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    transformers.CLIPModel(config).save_pretrained(folder)
    transformers.CLIPImageProcessorPil().save_pretrained(folder)
    return folder


def test_clip_sees_what_the_official_preprocessing_shows(clip):
    embed = clip_embedding(clip)
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (300, 600, 3), dtype=np.uint8))
    wide = noise.resize((448, 224), Image.BICUBIC).crop((112, 0, 336, 224))  # (W, H), short side first
    pixels = (np.asarray(wide) / 255 - [0.48145466, 0.4578275, 0.40821073]) / [0.26862954, 0.26130258, 0.27577711]
    model = transformers.CLIPModel.from_pretrained(clip)
    pixels = torch.tensor(pixels, dtype=torch.float32).permute(2, 0, 1)[None]
    with torch.no_grad():
        expected = model.get_image_features(pixels).pooler_output.numpy()
    vectors = embed([noise, Image.new("L", (300, 900), 9), noise])
    assert vectors.shape == (3, 16)
    assert np.abs(vectors[[0]] - expected).max() < 1e-3 * np.abs(expected).max()
    assert np.allclose(vectors[0], vectors[2], atol=1e-5) and not np.allclose(vectors[0], vectors[1], atol=1e-2)


def test_a_page_is_its_references_equal_with_clip(browser, clip):
    tasks = [Task("", plain_page()), Task("", plain_page("#22cc22"))]
    same, other = cosine_rewards(tasks, [plain_page()] * 2, clip_embedding(clip))
    assert same == 1.0 and other < 1.0


def test_no_clip_is_one_line(tmp_path):
    with pytest.raises(InputError, match="CLIP model .*nowhere: cannot be loaded"):
        clip_embedding(str(tmp_path / "nowhere"))


def test_tasks_from_websight():
    row = {"text": "<html><img src='https://source.unsplash.com/random/300x200/?cat'></html>", "llm_generated_idea": "Cats"}
    (task,) = websight_tasks([row])
    assert task == Task("Cats", "<html><img src='https://picsum.photos/id/48/300/200'></html>")


# ------------------------------------------------------------------------------------------ the human who sees
def said(*messages):
    """A dialogue: the request, then messages of the agent and the human in turn."""
    roles = ["user", "assistant"] * len(messages)
    return [{"role": role, "content": text} for role, text in zip(roles, ["a page", *messages])]


def two_pictures(tasks, dialogues):
    sizes = [(60 + 90 * i, 90) for i in range(len(tasks))]
    return [(Image.new("RGB", size, "red"), Image.new("RGB", size, "blue")) for size in sizes]


def test_the_human_sees_the_reference_and_the_last_message(browser):
    red, blue = GREEN.replace("00ff00", "ff0000"), GREEN.replace("00ff00", "0000ff")
    dialogues = [said(f"here: {blue}", "no", f"{GREEN} and text"), said(GREEN, "no", "what would you like?")]
    pictures = page_pictures([Task("", red), Task("", blue)], dialogues)
    expected = [[(255, 0, 0), (0, 255, 0)], [(0, 0, 255), (0, 0, 0)]]
    assert [[colour(picture) for picture in pair] for pair in pictures] == expected


def test_a_server_is_sent_both_pictures_and_no_code():
    with server(lambda body, number: {"choices": [{"message": {"content": "x" * 2000}}]}) as (url, requests):
        human = ServerSimulator(ChatServer(url), FRONTEND_HUMAN_PROMPT, two_pictures)
        dialogue = said("<html>secret</html>", "wider", "```html\n<HTML>secret</html>\n``` <body>secret")
        assert human.reply([Task("my shop", "<html>secret</html>")], [dialogue]) == ["x" * 2000]
    *pictures, text = requests[0]["body"]["messages"][0]["content"]
    decoded = [base64.b64decode(p["image_url"]["url"].removeprefix("data:image/png;base64,")) for p in pictures]
    assert [p["type"] for p in pictures] == ["image_url"] * 2
    assert [colour(Image.open(io.BytesIO(data))) for data in decoded] == [(255, 0, 0), (0, 0, 255)]
    assert "secret" not in text["text"] and "my shop" in text["text"] and "You: wider" in text["text"]


SIGNS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
SEEING_TEMPLATE = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}
{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}
{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """(model, tokenizer) of a tiny random Qwen2-VL that was saved to a folder and loaded as the real one is."""
    folder = str(tmp_path_factory.mktemp("qwen2-vl"))
    bytes_only = {letter: i for i, letter in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE(bytes_only, merges=[]))
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>", additional_special_tokens=SIGNS
    )
    tokenizer.chat_template = SEEING_TEMPLATE
    names = {"image": "<|image_pad|>", "video": "<|video_pad|>", "vision_start": SIGNS[3], "vision_end": SIGNS[4]}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    text = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": len(tokenizer), **heads}
    config = transformers.Qwen2VLConfig(
        text_config=text,
        vision_config={"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 14},
        **{f"{name}_token_id": tokenizer.convert_tokens_to_ids(sign) for name, sign in names.items()},
    )
    torch.manual_seed(0)
    model = transformers.Qwen2VLForConditionalGeneration(config)
    for weight in model.parameters():
        weight.data.mul_(4 if weight.dim() > 1 else 1)  # so that what is seen decides what is said
    for part in model, tokenizer, transformers.Qwen2VLImageProcessorPil():
        part.save_pretrained(folder)
    return sweet_rl.load_model(folder, "cpu", sees=True)


def conversation(text, *colours, size=(90, 60)):
    pictures = [{"type": "image", "image": Image.new("RGB", size, colour)} for colour in colours]
    return [{"role": "user", "content": [*pictures, {"type": "text", "text": text}]}]


def test_a_local_model_says_in_a_batch_what_it_says_alone(qwen):
    chat = SeeingChatModel(*qwen, temperature=0.0, max_new_tokens=12, batch_size=2)
    talks = [
        conversation("what?", "red", "blue"),
        conversation("what is it that you see?", "red", "red", size=(200, 120)),
        conversation("a text that names <|image_pad|> and <|image_pad|>", "green", "white"),
    ]
    together = [action.text for action in chat(talks)]
    assert together == [chat([talk])[0].text for talk in talks]
    assert len(set(together)) == 3 and all(together)


def test_a_local_model_reads_the_pictures_as_the_model_expects(qwen):
    model, tokenizer = qwen
    chat = SeeingChatModel(model, tokenizer, temperature=0.0, max_new_tokens=4)
    talk = conversation("what?", "red", "blue", size=(28 * 6, 28 * 4))
    ids = chat.picture_ids(chat_prompt(tokenizer, talk), [24, 24])
    assert ids.count(model.config.image_token_id) == 48
    told = {colours: chat([conversation("what?", *colours)])[0].text for colours in (("red", "blue"), ("blue", "red"))}
    assert told["red", "blue"] != told["blue", "red"]
    big = chat.image_processor([Image.new("RGB", (1280, 8000))], return_tensors="pt")
    assert big["image_grid_thw"].prod() // 4 <= 1280


def test_a_local_human_who_sees(qwen):
    human = LLMSimulator(*qwen, FRONTEND_HUMAN_PROMPT, 2, two_pictures)
    replies = human.reply([Task("a page", "<html>secret</html>")] * 3, [said("<html>1</html>")] * 3)
    assert len(replies) == 3 and all(isinstance(reply, str) and reply for reply in replies)


def test_another_kind_of_seeing_model_is_one_line(qwen, clip, monkeypatch):
    monkeypatch.setattr(qwen[0], "name_or_path", clip)
    with pytest.raises(InputError, match="expected Qwen2-VL"):
        LLMSimulator(*qwen, FRONTEND_HUMAN_PROMPT, 2, two_pictures)


# ------------------------------------------------------------------------------------------ a critic that sees
ASK, SAID = {"role": "user", "content": "a page"}, {"role": "assistant", "content": "no <|image_pad|> page"}
CRITIC_DIALOGUE = [{"role": "system", "content": "design."}, ASK, SAID, {"role": "user", "content": "blue"}, SAID]


@pytest.fixture
def seeing_critic(browser, qwen):
    chat = SeeingChatModel(*qwen)
    critic = sweet_rl.HeadCritic(copy.deepcopy(qwen[0]), chat.image_processor)
    torch.nn.init.normal_(critic.head.weight, generator=torch.Generator().manual_seed(0))
    return critic.eval(), sweet_rl.SeeingEncoder(chat, None)


def test_a_seeing_critic_values_a_turn_by_the_mean_of_all_it_has_read(seeing_critic):
    critic, encoder = seeing_critic
    branch = encoder.dialogue(CRITIC_DIALOGUE, GREEN.format("c"))
    group = [branch, encoder.dialogue(CRITIC_DIALOGUE[:3], GREEN.format("other"))]
    packed = sweet_rl.pack([group], plain=True)
    with torch.no_grad():
        values = critic.turn_values(packed, [b.picture for b in group for _ in b.prompts])
        for turn, (prompt, action) in enumerate(zip(branch.prompts, branch.actions)):
            ids = torch.tensor([prompt + action])
            kinds = (ids == critic.config.image_token_id).int()
            hidden = critic.model.model(input_ids=ids, mm_token_type_ids=kinds, **branch.picture).last_hidden_state
            assert kinds.sum() == branch.picture["image_grid_thw"].prod() // 4  # what the message said of pictures is none
            wanted = critic.head(hidden.mean(1)).item()
            assert values[0][packed.turn_ids[0] == turn].tolist() == pytest.approx([wanted] * len(action), abs=1e-4)


def test_a_run_whose_critic_sees(seeing_critic, qwen, tmp_path, capsys):
    """It trains, is saved, loaded, and ranks candidates by what the reference looks like."""
    encoder, out = seeing_critic[1], tmp_path / "out"
    tokenizer = sweet_rl.tiny_tokenizer("frontend")
    sweet_rl.save_model(sweet_rl.tiny_model(tokenizer), tokenizer, out / "base")
    (task,) = colbench.miniature_page_tasks("train", 1)
    page = {"role": "assistant", "content": task.ground_truth}
    pair = {"chosen": [*CRITIC_DIALOGUE[:2], page], "rejected": CRITIC_DIALOGUE, "ground_truth": task.ground_truth}
    colbench.write_jsonl(out / "trajectory_pairs.jsonl", [pair] * 2)
    colbench.save_trajectories(out / "trajectories.jsonl", [colbench.Trajectory(task, [ASK, page], task.ground_truth, 1.0)])
    flags = ["--task", "frontend", "--critic-model", qwen[0].name_or_path, "--stages", "critic,candidates", "--methods", "sweet"]
    flags += ["--candidates", "2", "--critic-epochs", "3", "--critic-lr", "1e-3", "--max-length", "4000", "--out", str(out)]
    assert sweet_rl.main(flags) == 0, capsys.readouterr().err
    (row,) = colbench.read_jsonl(out / "candidates.jsonl", {"advantages": list})
    assert len(row["advantages"]) == 2 and row["advantages"][0] != row["advantages"][1]
    sweet = sweet_rl.Sweet(sweet_rl.parse_settings(flags))
    critic = sweet.critic_model()[0]
    messages = sweet_rl.candidate_messages(row)
    for reference, same in ((task.ground_truth, True), (GREEN.format("another"), False)):
        scores = sweet.advantages(critic, None, [sweet_rl.Example(encoder.candidates(row["messages"], messages, reference))])
        assert ([score[0] for score in scores[0]] == pytest.approx(row["advantages"], abs=1e-6)) == same


def test_only_a_page_has_a_picture(capsys):
    assert sweet_rl.main(["--critic-model", "somewhere"]) == 2
    assert "--critic-model: expected with --task frontend only" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------ a whole run, small
def test_a_small_run_from_dialogues_to_the_report(browser, monkeypatch, tmp_path, capsys):
    small = dataclasses.replace(sweet_rl.MINIATURES["frontend"], warm_up_tasks=60)
    monkeypatch.setitem(sweet_rl.MINIATURES, "frontend", small)
    monkeypatch.setattr(sweet_rl, "WARM_UP_EPOCHS", 1)
    rng, tasks = random.Random(0), colbench.miniature_page_tasks("train", 4)
    author = lambda histories: [colbench.Action(sweet_rl.scripted_designer(h, None, rng, False)) for h in histories]  # noqa: E731
    played = colbench.rollout(author, ScriptedDesigner().reply, tasks * 2, 10, colbench.final_page, 1000)
    colbench.save_trajectories(tmp_path / "offline.jsonl", played)
    flags = ["--task", "frontend", "--trajectories", str(tmp_path / "offline.jsonl"), "--num-tasks", "4", "--candidates", "2"]
    flags += ["--max-new-tokens", "12", "--out", str(tmp_path / "out")]
    assert sweet_rl.main(flags) == 0, capsys.readouterr().err
    printed = capsys.readouterr().out
    assert "cosine x 100" in printed and "win rate %" in printed
    methods = json.loads((tmp_path / "out" / "results.json").read_text())["methods"]
    assert list(methods) == list(sweet_rl.METHODS) and methods["zero-shot"]["win_rate"] == 0.5
    rewards = [t.reward for t in colbench.load_trajectories(tmp_path / "out" / "trajectories.jsonl", colbench.BENCHMARKS["frontend"].task_fields)]
    assert rewards == cosine_rewards(tasks * 2, [t.answer for t in played], pixel_embedding) and len(set(rewards)) > 2
    assert (tmp_path / "out" / "report.html").read_text().count("data:image/png;base64,") == 4 * 3
    other = ["--against", str(tmp_path / "out" / "eval_sweet_greedy.jsonl"), "--methods", "sweet"]
    assert sweet_rl.main([*flags, *other]) == 0
    assert json.loads((tmp_path / "out" / "results.json").read_text())["methods"]["sweet"]["greedy"]["win_rate"] == 0.5
