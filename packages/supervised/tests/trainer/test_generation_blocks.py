"""`{% generation %}` blocks mark what transformers marks in the whole conversation, of what the assistant says."""

import pytest
import transformers

from shared.errors import InputError
from shared.models.chat import ChatTokenizer
from tests.support.templates import model_folder, write_json
from volley_supervised.conversations.rendering import render_demonstration

transformers.logging.set_verbosity_error()
BEGIN, END = "{% generation %}", "{% endgeneration %}"
HEADER, SAID = "<|im_start|>assistant\n", "{{ m.content }}<|im_end|>"
BLOCK = BEGIN + SAID + END
CHATML = (
    "{% for m in messages %}{% if m.role == 'assistant' %}TURN\n{% else %}<|im_start|>{{ m.role }}\n" + SAID + "\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}" + HEADER + "{% endif %}"
)
THOUGHT = "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
LAST_USER = (
    "{% set n = namespace(i=0) %}{% for o in messages %}{% if o.role == 'user' %}{% set n.i = loop.index0 %}{% endif %}"
    "{% endfor %}"
)


def where(condition):
    """A turn that is marked where the condition holds."""
    return HEADER + "{% if " + condition + " %}" + BLOCK + "{% else %}" + SAID + "{% endif %}"


TURNS = {
    "all": HEADER + BLOCK,
    "with the header": BEGIN + HEADER + SAID + END,
    "last": where("loop.last"),
    "first": where("loop.index0 < 2"),
    "not last": where("not loop.last"),
    "before a user": where("loop.nextitem is defined"),
    "by the next message": where("loop.nextitem is not defined or '!' not in loop.nextitem.content"),
    "by the number of messages": where("messages | length > 4 or loop.last"),
    "after the last user": LAST_USER + where("loop.index0 > n.i"),
    "by a key": where("m.keep"),
    "a part": HEADER + BEGIN + "{{ m.content }}" + END + "<|im_end|>",
    "the end": HEADER + "{{ m.content }}" + BEGIN + "<|im_end|>" + END,
    "two": HEADER
    + f"{BEGIN}{{{{ m.content[:1] }}}}{END}{{{{ m.content[1:3] }}}}{BEGIN}{{{{ m.content[3:] }}}}{END}<|im_end|>",
    "in loops": HEADER + "{% for w in m.content.split(' ') %}{% if not loop.first %} {% endif %}{% for c in w %}"
    "{% if c in 'aeioux4' %}" + BEGIN + "{{ c }}" + END + "{% else %}{{ c }}{% endif %}{% endfor %}{% endfor %}"
    "<|im_end|>",
    "nested": HEADER + BEGIN + BEGIN + "{{ m.content }}" + END + "<|im_end|>" + END,
    "empty": HEADER + BEGIN + END + BLOCK,
    "without space": HEADER.replace("\n", "{{ '\\n' }}")
    + "{%- generation -%} \n "
    + SAID
    + " {%- endgeneration -%} \n",
    "in a macro": HEADER + "{% macro said(m) %}" + BLOCK + "{% endmacro %}{{ said(m) }}",
    "around a variable": HEADER + BEGIN + "{% set s %}{{ m.content }}{% endset %}{{ s }}<|im_end|>" + END,
    "with what follows": HEADER + BEGIN + SAID + "\n" + END,
}
OPTIONS = {"return_dict": True, "return_assistant_tokens_mask": True}


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **keys):
    return {"role": "assistant", "content": content, **keys}


TALKS = [
    [user("2+2?"), assistant("4")],
    [
        user("2+2?"),
        assistant("four it is", keep=True),
        user("no!"),
        assistant("five then"),
        user("?"),
        assistant("x y"),
    ],
    [{"role": "system", "content": "s"}, user("a"), assistant("Right"), user("!"), assistant("größer, 数学.")],
]


def both(folder, turn):
    """The two tokenizers of a template."""
    folder = model_folder(folder, CHATML.replace("TURN", turn))
    write_json(folder / "generation_config.json", {"eos_token_id": 2})
    return transformers.AutoTokenizer.from_pretrained(folder), ChatTokenizer(folder)


@pytest.mark.parametrize("name", TURNS)
def test_a_mask_is_that_of_transformers_on_what_the_assistant_says(name, tmp_path):
    reference, tokenizer = both(tmp_path / "marked", TURNS[name])
    _, unmarked = both(
        tmp_path / "plain", TURNS[name].replace("endgeneration", "endif").replace("generation", "if true")
    )
    n_marked = 0
    for messages in TALKS:
        whole = reference.apply_chat_template(messages, **OPTIONS)
        ids, is_said = render_demonstration(unmarked, messages)
        assert ids == whole["input_ids"][: len(ids)]
        expected = [mark * said for mark, said in zip(whole["assistant_masks"], is_said, strict=False)]
        n_marked += sum(expected)
        if any(expected):
            assert render_demonstration(tokenizer, messages) == (ids, expected)
            continue
        with pytest.raises(InputError, match="marks nothing"):
            render_demonstration(tokenizer, messages)
    assert n_marked


def test_a_turn_that_is_not_to_be_learned_is_not_marked(tmp_path):
    _, tokenizer = both(tmp_path / "model", TURNS["all"])
    ids, mask = render_demonstration(tokenizer, TALKS[1], (), [True, False, True, True, True, False])
    assert tokenizer.decode([i for i, one in zip(ids, mask, strict=True) if one]) == "five then<|im_end|>"
    _, tokenizer = both(tmp_path / "last", TURNS["last"])
    with pytest.raises(InputError, match="marks nothing"):
        render_demonstration(tokenizer, TALKS[1], (), [True, True, True, True, True, False])


@pytest.mark.parametrize(
    ("condition", "expected"), [("true", "firstb<|im_end|>thenc<|im_end|>"), ("loop.last", "thenc<|im_end|>")]
)
def test_reasoning_that_a_template_drops_from_earlier_turns_is_marked_like_its_turn(condition, expected, tmp_path):
    """The turn stays as it is sampled; transformers has no token for its reasoning."""
    written = "{% if loop.last %}" + THOUGHT.replace("<think>", "").replace("</think>", "") + "{% endif %}" + SAID
    turn = HEADER + "{% if " + condition + " %}" + BEGIN + written + END + "{% else %}" + written + "{% endif %}"
    _, tokenizer = both(tmp_path / "model", turn)
    messages = [
        user("a"),
        assistant("b", reasoning_content="first"),
        user("!"),
        assistant("c", reasoning_content="then"),
    ]
    ids, mask = render_demonstration(tokenizer, messages)
    assert tokenizer.decode([i for i, one in zip(ids, mask, strict=True) if one]) == expected


@pytest.mark.parametrize(
    "turn",
    [
        "{% macro said(m) %}" + HEADER + BLOCK + "{% endmacro %}{{ said(m) }}",
        "{% set s %}" + HEADER + BLOCK + "{% endset %}{{ s }}",
        HEADER + "{% filter upper %}" + BLOCK + "{% endfilter %}",
    ],
)
def test_blocks_whose_text_transformers_does_not_find_are_refused(turn, tmp_path):
    reference, tokenizer = both(tmp_path / "model", turn)
    whole = reference.apply_chat_template(TALKS[1], **OPTIONS)
    marked = reference.decode([i for i, one in zip(whole["input_ids"], whole["assistant_masks"], strict=True) if one])
    assert "<|im_start|>" in marked or marked.isupper()
    with pytest.raises(InputError, match="transformers marks other text"):
        render_demonstration(tokenizer, TALKS[1])


def test_a_character_of_several_tokens_is_marked_whole(tmp_path):
    """Transformers marks the first token of the last character."""
    reference, tokenizer = both(tmp_path / "model", TURNS["a part"])
    messages = [user("a"), assistant("数")]
    ids, mask = render_demonstration(tokenizer, messages)
    assert tokenizer.decode([i for i, one in zip(ids, mask, strict=True) if one]) == "数"
    assert sum(reference.apply_chat_template(messages, **OPTIONS)["assistant_masks"]) < sum(mask)
