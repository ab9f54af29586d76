"""Chat templates: what they say is what is encoded, and nothing they do escapes."""

import datetime
import json
import re

import pytest

from engine.tokenizer import load_tokenizer, tokenizer_from_gguf

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def render(byte_level_fields):
    def apply(template, messages=HELLO, **arguments):
        fields = byte_level_fields | {"tokenizer.chat_template": template}
        return tokenizer_from_gguf(fields).apply_chat_template(messages, **arguments)

    return apply


def test_a_conversation(render):
    messages = [*HELLO, {"role": "assistant", "content": "<hi> & 'bye'"}, *HELLO]
    assert render(CHATML, messages) == (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n<hi> & 'bye'<|im_end|>\n"
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert render(CHATML, add_generation_prompt=False) == "<|im_start|>user\nhello<|im_end|>\n"


@pytest.mark.parametrize("add_bos_token", [True, False])
@pytest.mark.parametrize("writes_bos", [True, False])
def test_b93_chat_ids_are_exactly_what_the_template_says(
    writes_bos, add_bos_token, byte_level_fields
):
    template = ("{{ bos_token }}" if writes_bos else "") + "{{ messages[0].content }}"
    tokenizer = tokenizer_from_gguf(
        byte_level_fields
        | {"tokenizer.chat_template": template, "tokenizer.ggml.add_bos_token": add_bos_token}
    )
    hello = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode_chat(HELLO) == [1] * writes_bos + hello
    assert tokenizer.encode("hello") == [1] * add_bos_token + hello
    # A template that really begins with two keeps them.
    two = byte_level_fields | {"tokenizer.chat_template": "{{ bos_token * 2 }}x"}
    assert tokenizer_from_gguf(two).encode_chat(HELLO)[:2] == [1, 1]


def test_b93_directory_and_gguf_give_equal_chat_ids(directory, byte_level_json, byte_level_fields):
    template = "{{ bos_token }}" + CHATML
    config = {
        "chat_template": template,
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
    }
    path = directory(byte_level_json, **{"tokenizer_config.json": config})
    other = tokenizer_from_gguf(byte_level_fields | {"tokenizer.chat_template": template})
    assert load_tokenizer(path).encode_chat(HELLO) == other.encode_chat(HELLO)


def test_surroundings_that_templates_rely_on(render):
    assert render("  {% if true %}\nyes\n  {% endif %}\nend\n") == "yes\nend"
    assert (
        render("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}")
        == "012"
    )
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}!") == "hello!"
    assert (
        render("{{ bos_token + eos_token + pad_token }}{{ unk_token }}")
        == "<|im_start|><|im_end|><|endoftext|>"
    )
    assert render("{{ {'b': '<é>', 'a': 1} | tojson }}") == '{"b": "<é>", "a": 1}'
    assert render("{{ [1, 2] | tojson(indent=2) }}") == json.dumps([1, 2], indent=2)
    assert (
        render("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}")
        == '{"a":2,"b":1}'
    )
    today = datetime.date.today()
    year = int(render("{{ strftime_now('%Y') }}"))
    assert today.year <= year <= datetime.date.today().year
    assert re.fullmatch(r"\d\d \w{3} \d{4}", render("{{ strftime_now('%d %b %Y') }}"))
    assert (
        render("{{ tools is none }}{{ documents is none }}{{ thinking is defined }}")
        == "TrueTrueFalse"
    )
    assert render("{{ thinking }}", thinking=False) == "False"
    assert render("{{ bos_token }}", bos_token="other") == "other"


def test_none_values_of_a_message_are_absent(render):
    template = "{{ messages[0].content is defined }}{{ messages[0].tool_calls is defined }}"
    messages = [{"role": "assistant", "content": None, "tool_calls": [1]}]
    assert render(template, messages) == "FalseTrue"
    assert messages[0]["content"] is None


def test_tools_choose_their_template(directory, byte_level_json):
    named = [
        {"name": "default", "template": "D{{ tools | length if tools }}"},
        {"name": "tool_use", "template": "T{{ tools[0].name }}"},
    ]
    path = directory(byte_level_json, **{"tokenizer_config.json": {"chat_template": named}})
    tokenizer = load_tokenizer(path)
    assert tokenizer.chat_template_names == ("default", "tool_use")
    assert tokenizer.apply_chat_template(HELLO) == "D"
    assert tokenizer.apply_chat_template(HELLO, tools=[{"name": "f"}]) == "Tf"
    only_tools = {"tokenizer_config.json": {"chat_template": named[1:]}}
    tokenizer = load_tokenizer(directory(byte_level_json, **only_tools))
    with pytest.raises(ValueError, match=r"no chat template named 'default'.*tool_use"):
        tokenizer.apply_chat_template(HELLO)


def test_template_files_come_before_the_config(directory, byte_level_json):
    path = directory(
        byte_level_json,
        **{
            "tokenizer_config.json": {"chat_template": "config"},
            "chat_template.jinja": "file {{ messages[0].role }}",
            "additional_chat_templates/tool_use.jinja": "tools",
        },
    )
    tokenizer = load_tokenizer(path)
    assert tokenizer.apply_chat_template(HELLO) == "file user"
    assert tokenizer.apply_chat_template(HELLO, tools=[{}]) == "tools"


def test_no_template_says_how_to_go_on(byte_level_fields):
    tokenizer = tokenizer_from_gguf(byte_level_fields)
    with pytest.raises(
        ValueError, match=r"no chat template: give it plain text.*chat_template\.jinja"
    ):
        tokenizer.apply_chat_template(HELLO)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "'default' failed: roles must alternate"),
        ("{% if %}", "failed"),
        ("{% for %}{{", "failed"),
        ("{{ messages[0].content + 1 }}", "failed"),
        ("{{ 1 / 0 }}", "failed"),
        ("{{ nothing.here }}", "failed"),
        ("{{ messages[0].content.upper(1, 2) }}", "failed"),
        ("{{ 'x' | nosuchfilter }}", "failed"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "failed"),
        ("{{ range(10000000) | list }}", "failed"),
    ],
)
def test_template_errors_are_value_errors(template, message, render):
    with pytest.raises(ValueError, match=message):
        render(template)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'a': 1}) }}",
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''.__class__.__base__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__['json'] }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{% include 'x' %}",
        "{% import 'os' as os %}",
    ],
)
def test_templates_cannot_leave_the_sandbox(template, render):
    messages = [{"role": "user", "content": "hello"}]
    try:
        text = render(template, messages)
    except ValueError as error:
        text = str(error)
        assert "failed" in text
    # What the sandbox hides is either refused or undefined, which renders as nothing.
    assert "failed" in text or text == ""
    assert messages == HELLO


@pytest.mark.parametrize(
    ("messages", "tools", "message"),
    [
        ([], None, "non-empty list"),
        ("hello", None, "non-empty list"),
        (None, None, "non-empty list"),
        (["hello"], None, "must be a mapping"),
        (HELLO, "tools", "tools must be a list"),
        (HELLO, [print], "tools must be a list"),
    ],
)
def test_bad_conversations_are_refused(messages, tools, message, render):
    with pytest.raises(ValueError, match=message):
        render(CHATML, messages, tools=tools)
