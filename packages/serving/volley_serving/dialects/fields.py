"""Request fields of OpenAI, vLLM and SGLang that the OpenAI routes accept without acting on them.

A field that would change the answer is refused by name, unless its value asks for nothing. A null field is an absent
one.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from shared.bounds import is_one_of
from shared.errors import InputError

IGNORED = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "prediction"),
        *("request_id", "rid", "session_id", "conversation_id", "extra_key", "cache_salt", "priority"),
        *("custom_labels", "no_logs", "log_metrics", "stream_reasoning", "inference_geo"),
        *("cache_control", "diagnostics", "user_profile_id", "workspace_id"),
        *("return_token_ids", "return_prompt_token_ids", "spaces_between_special_tokens", "guided_decoding_backend"),
    }
)
"""Fields that change neither text nor tokens of an answer, whatever their value."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "min_p": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_new_tokens": (0,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "top_logprobs": (0,),
    "stream_options": ({}, {"include_usage": False}),
    "parallel_tool_calls": (True, False),
    "separate_reasoning": (True, False),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "modalities": (["text"], []),
    "verbosity": ("medium",),
    "background": (False,),
    "stop_regex": ("", []),
    "no_stop_trim": (False, True),
    "include_stop_str_in_output": (False,),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
    "include_reasoning": (True,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "bad_words": ([],),
    "logits_processors": ([],),
    "image_data": ([],),
    "video_data": ([],),
    "audio_data": ([],),
    "token_ids_logprob": ([],),
    "return_text_in_logprobs": (False,),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "routed_experts_start_len": (0,),
    "return_meta_info": (False,),
    "return_cached_tokens_details": (False,),
    "return_bytes": (False,),
    "return_entropy": (False,),
    "use_audio_in_video": (False,),
}
"""Fields that would change an answer, with the values that ask for nothing."""

RESPONSES_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **NEUTRAL,
    "truncation": ("disabled",),
    "text": ({},),
    "reasoning": ({},),
    "include": ([],),
    "stream_options": ({}, {"include_obfuscation": False}, {"include_obfuscation": True}),
}
MESSAGES_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **NEUTRAL,
    "mcp_servers": ([],),
    "betas": ([],),
    "speed": ("standard",),
}

_HINTS = {
    "previous_response_id": "; the server keeps no responses: send the whole conversation as input",
    "conversation": "; the server keeps no conversations: send the whole conversation as input",
    "chat_template": "; render the prompt yourself, and send its ids to /v1/completions",
    "enable_thinking": "; send it to /v1/chat/completions in chat_template_kwargs",
}
_MOST_NAMED = 10


def honoured(
    raw: Mapping[str, Any], known: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]] = NEUTRAL
) -> dict[str, Any]:
    """Return the fields of `raw` that are `known` and not null.

    Raises InputError naming the other fields that would change the answer.
    """
    given = {str(name): value for name, value in raw.items() if value is not None}
    refused = [
        name for name in given.keys() - known.keys() - IGNORED if not is_one_of(given[name], neutral.get(name, ()))
    ]
    if refused:
        told = [f"{name[:80]}={reprlib.repr(given[name])}" for name in sorted(refused)[:_MOST_NAMED]]
        hints = "".join(_HINTS.get(name, "") for name in sorted(refused))
        raise InputError(f"{', '.join(told)} {'is' if len(refused) == 1 else 'are'} not supported", f"leave out{hints}")
    return {name: value for name, value in given.items() if name in known}
