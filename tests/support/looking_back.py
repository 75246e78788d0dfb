"""Chat templates that only append, and templates that change earlier messages when later ones are added.

Those of model families are as they were published, but for line breaks.
"""

from tests.support.templates import published

_ALTERNATE = (
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}"
    "{% endif %}"
)
_LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
    + _ALTERNATE
    + "{% if loop.index0 == 0"
    " and system_message != false %}{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' +"
    " message['content'] %}{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
_MISTRAL = (
    "{{ bos_token }}{% for message in messages %}" + _ALTERNATE + "{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ message['content'] + eos_token }}{% else %}{{ raise_exception('Only user and assistant roles!') }}{% endif %}"
    "{% endfor %}"
)
_MISTRAL_TOOLS = """\
{%- if messages[0]["role"] == "system" %}{%- set system_message = messages[0]["content"] %}
{%- set loop_messages = messages[1:] %}{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace() %}{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("roles must alternate") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] " + (tools | tojson) + "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {{- (tool_call.function | tojson)[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id|length != 9 %}
                {{- raise_exception("IDs have length 9") }}
            {%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}{{- " " + message["content"]|trim + eos_token }}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content|string + ", " }}
        {%- if not message.tool_call_id is defined or message.tool_call_id|length != 9 %}
            {{- raise_exception("IDs have length 9") }}
        {%- endif %}
        {{- '"call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}{{- raise_exception("Only user and assistant roles are supported") }}{%- endif %}
{%- endfor %}"""
_SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
FAMILIES = {
    **{name: text for name, text in published().items() if name in (
        *("qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_6", "llama3", "llama3_1", "llama3_2"),
        *("deepseekv3", "deepseek_r1_distill", "gemma", "gemma3", "gemma3_training", "phi3", "glm4moe"),
        *("gptoss", "nemotron_3_nano"),
    )},
    "llama2": _LLAMA2, "mistral 7B v0.2": _MISTRAL, "mistral 7B v0.3": _MISTRAL_TOOLS, "smollm2": _SMOLLM2,
}  # fmt: skip

_BEGIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
_CALLS = "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
_HEADER = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = _BEGIN + "{{ m.content }}" + _CALLS + "<|im_end|>\n{% endfor %}" + _HEADER
_TOOLS = "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
_N = "{{ messages | length }}"


def _with(content: str) -> str:
    return CHATML.replace("{{ m.content }}", content)


_LAST_USER = "{% if m.role == 'user' and messages[loop.index:] | selectattr('role', 'equalto', 'user') | list == [] %}"
APPENDING = {
    "chatml with tools": _TOOLS + CHATML,
    "tools at the first user": _with(
        "{% if m.role == 'user' and messages[:loop.index0] | selectattr('role', 'equalto', 'user') | list == [] %}"
        "{{ tools | tojson }}{% endif %}{{ m.content }}"
    ),
    "numbers turns, the next one too": _with("[{{ loop.index }}]\n{{ m.content }}").replace(
        "assistant\n{% endif", "assistant\n[{{ messages | length + 1 }}]\n{% endif"
    ),
    "numbers users": _with("{% if m.role == 'user' %}[{{ loop.index }}] {% endif %}{{ m.content }}"),
    "bos once": "{{ bos_token }}" + CHATML,
    "trims": _with("{{ m.content | trim }}"),
    "no newline after a turn": CHATML.replace("<|im_end|>\n", "<|im_end|>"),
    "two newlines after a turn": CHATML.replace("<|im_end|>\n", "<|im_end|>\n\n"),
    "prompt after any but the assistant": CHATML.replace(
        "add_generation_prompt", "add_generation_prompt and messages[-1].role != 'assistant'"
    ),
    "alternation required": CHATML.replace(
        _BEGIN,
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}{% for m in messages %}"
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
        "<|im_start|>{{ m.role }}\n",
    ),
    "generation blocks": CHATML.replace(
        "{{ m.content }}" + _CALLS,
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}" + _CALLS + "{% endgeneration %}{% else %}"
        "{{ m.content }}{% endif %}",
    ),
    "names who spoke before": _with(
        "{% if loop.index0 %}(after {{ messages[loop.index0 - 1].role }})\n{% endif %}{{ m.content }}"
    ).replace(
        "assistant\n{% endif", "assistant\n(after {{ messages[-1].role }})\n{% endif"
    ),
}  # fmt: skip
LOOKING_BACK = {
    "counts the messages": "turns: " + _N + "\n" + CHATML,
    "counts the messages at the end of users": _with(
        "{{ m.content }}{% if m.role == 'user' %} of " + _N + "{% endif %}"
    ),
    "numbers turns, not the next one": CHATML.replace("{{ m.role }}\n", "{{ m.role }} {{ loop.index }}\n"),
    "numbers from the end": _with("[-{{ loop.revindex }}] {{ m.content }}"),
    "cuts all but the last answer": _with(
        "{{ m.content if m.role != 'assistant' or loop.index0 > messages | length - 2 else '(earlier)' }}"
    ),
    "cuts long answers": _with("{{ m.content[:300] if m.role == 'assistant' and not loop.last else m.content }}"),
    "reminds after the last user": _with("{{ m.content }}" + _LAST_USER + "\n/think{% endif %}"),
    "reminds in the last message": _with("{{ m.content }}{% if loop.last %}\n/think{% endif %}"),
    "tools at the last user": _with(_LAST_USER + "{{ tools | tojson }}\n{% endif %}{{ m.content }}"),
    "system at the last user": _with(
        _LAST_USER + "{{ messages[0].content if messages[0].role == 'system' }}\n{% endif %}{{ m.content }}"
    ),
    "keeps four messages": CHATML.replace("in messages %}", "in messages[-4:] %}"),
    "ends earlier turns otherwise": CHATML.replace(
        "<|im_end|>\n", "{{ '<|im_end|>' if loop.last else '<|endoftext|>' }}\n"
    ),
    "notes earlier answers": _with(
        "{% if m.role == 'assistant' and not loop.last %}[earlier answer] {% endif %}{{ m.content }}"
    ),
    "numbers answers": "{% set ns = namespace(n=0) %}" + _with(
        "{% if m.role == 'assistant' %}{% set ns.n = ns.n + 1 %}Answer {{ ns.n }}: {% endif %}{{ m.content }}"
    ),
    "adds words to answers": _with("{{ m.content }}{% if m.role == 'assistant' %} (ok){% endif %}"),
    "changes the channel of earlier answers": _with(
        "{% if m.role == 'assistant' %}<|channel|>{{ 'final' if loop.last else 'earlier' }}<|message|>{% endif %}"
        "{{ m.content }}"
    ),
    "hoists tool results": "{% for m in messages if m.role == 'tool' %}<{{ m.content }}>{% endfor %}" + CHATML,
}  # fmt: skip
TEMPLATES = {**FAMILIES, **APPENDING, **LOOKING_BACK}
