"""The tests of chat.py: `python -m pytest -q test_chat.py`."""
from typing import NamedTuple

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import chat
from forms import Example

# --- Chat formats of public families, each template written anew from its format ---------------------------
class Family(NamedTuple):
    template: str
    specials: str       # special tokens, the one that ends a turn first
    bos: str | None
    eos: str
    adds_bos: bool      # does the tokenizer begin each text with BOS?
    prompt: str         # what SYSTEM and ASK become

SYSTEM, ASK = "Be brief.", "What is {1} + 2?\n"
CHATML = ("{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
          "{% endfor %}{{ '<|im_start|>assistant\n' if add_generation_prompt }}")

def with_default(system):
    """ChatML that opens with a system turn of its own where the messages have none."""
    return ("{% if messages[0].role != 'system' %}{{ '<|im_start|>system\n" + system + "<|im_end|>\n' }}"
            "{% endif %}" + CHATML)

LLAMA = ("{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' "
         "+ m.content | trim + '<|eot_id|>' }}{% endfor %}"
         "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' if add_generation_prompt }}")
GEMMA = ("{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system turns') }}"
         "{% endif %}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
         "{{ raise_exception('roles have to alternate') }}{% endif %}"
         "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim "
         "+ '<end_of_turn>\n' }}{% endfor %}{{ '<start_of_turn>model\n' if add_generation_prompt }}")
MISTRAL = ("{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' }}"
           "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}"
           "{{ m.content + '[/INST]' }}{% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}"
           "{% endif %}{% endfor %}")
OLMO = ("{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content }}"
        "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
        "{% if m.role != 'assistant' or not loop.last %}{{ '\n' }}{% endif %}{% endfor %}"
        "{{ '<|assistant|>\n' if add_generation_prompt }}")
PHI = ("{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
       "{{ '<|assistant|>\n' if add_generation_prompt else eos_token }}")
DEEPSEEK = ("{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}"
            "{% elif m.role == 'user' %}{{ '<｜User｜>' + m.content }}{% else %}"
            "{{ '<｜Assistant｜>' + m.content.split('</think>')[-1] + eos_token }}{% endif %}{% endfor %}"
            "{{ '<｜Assistant｜><think>\n' if add_generation_prompt }}")
IM = ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is {1} + 2?\n<|im_end|>\n"
      "<|im_start|>assistant\n")
IM_TOKENS = "<|im_end|> <|im_start|> <|endoftext|>"
LLAMA_TOKENS = "<|eot_id|> <|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|>"
PHI_TOKENS = "<|end|> <|endoftext|> <|system|> <|user|> <|assistant|> <s>"
DEEPSEEK_TOKENS = "<｜end▁of▁sentence｜> <｜begin▁of▁sentence｜> <｜User｜> <｜Assistant｜>"
FAMILIES = {
    "Qwen2.5": Family(with_default("You are Qwen."), IM_TOKENS, None, "<|im_end|>", False, IM),
    "SmolLM2": Family(with_default("You are SmolLM."), IM_TOKENS, "<|im_start|>", "<|im_end|>", False, IM),
    "Llama 3": Family(
        LLAMA, LLAMA_TOKENS, "<|begin_of_text|>", "<|end_of_text|>", True,
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nWhat is {1} + 2?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"),
    "Gemma 2": Family(
        GEMMA, "<end_of_turn> <start_of_turn> <bos> <eos>", "<bos>", "<eos>", True,
        "<bos><start_of_turn>user\nBe brief.\n\nWhat is {1} + 2?<end_of_turn>\n<start_of_turn>model\n"),
    "Mistral": Family(
        MISTRAL, "</s> <s> [INST] [/INST]", "<s>", "</s>", True,
        "<s>[INST] Be brief.\n\nWhat is {1} + 2?\n[/INST]"),
    "OLMo 2": Family(
        OLMO, "<|endoftext|>", "<|endoftext|>", "<|endoftext|>", False,
        "<|endoftext|><|system|>\nBe brief.\n<|user|>\nWhat is {1} + 2?\n\n<|assistant|>\n"),
    "Phi 3": Family(
        PHI, PHI_TOKENS, "<s>", "<|endoftext|>", False,
        "<|system|>\nBe brief.<|end|>\n<|user|>\nWhat is {1} + 2?\n<|end|>\n<|assistant|>\n"),
    "DeepSeek": Family(
        DEEPSEEK, DEEPSEEK_TOKENS, "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", True,
        "<｜begin▁of▁sentence｜>Be brief.<｜User｜>What is {1} + 2?\n<｜Assistant｜><think>\n")}
ALPACA = ("{% for m in messages %}{{ '### ' + ('Response' if m.role == 'assistant' else 'Instruction') "
          "+ ':\n' + m.content + '\n\n' }}{% endfor %}{{ '### Response:\n' if add_generation_prompt }}")

def tokenizer_of(family):
    """Bytes and the special tokens of a family."""
    alphabet = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(alphabet, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, normalized=False) for token in family.specials.split()])
    if family.adds_bos:
        core.post_processor = processors.TemplateProcessing(
            f"{family.bos}:0 $A:0", special_tokens=[(family.bos, core.token_to_id(family.bos))])
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token=family.bos, eos_token=family.eos,
                                   chat_template=family.template)

def turns(*contents):
    """system, user, assistant, user ... with these contents."""
    roles = ["system", *["user", "assistant"] * 3]
    return [{"role": role, "content": content} for role, content in zip(roles, contents)]

def asked(tokenizer, messages):
    return chat.chat_prompt_ids(tokenizer, Example("unused", "3", messages=messages))

def own_ids(tokenizer, messages):
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)

@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_is_asked_in_its_own_format_with_one_bos(name):
    family = FAMILIES[name]
    tokenizer = tokenizer_of(family)
    assert tokenizer.decode(asked(tokenizer, turns(SYSTEM, ASK))) == family.prompt
    question = Example(ASK, "3")
    assert chat.chat_prompt_ids(tokenizer, question) == own_ids(tokenizer, turns("", ASK)[1:])
    several = turns("", "1 + 1?", "2", ASK)[1:]
    assert asked(tokenizer, several) == own_ids(tokenizer, several)
    if name != "Gemma 2":
        assert asked(tokenizer, turns(SYSTEM, ASK)) == own_ids(tokenizer, turns(SYSTEM, ASK))
    for messages in (turns(SYSTEM, ASK), several):
        ids = asked(tokenizer, messages)
        if family.adds_bos or "bos_token" in family.template:
            ends = messages is several and family.bos == family.eos  # OLMo 2 ends a turn with the same token
            assert ids[0] == tokenizer.bos_token_id and ids.count(ids[0]) == 1 + ends

@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_stops_at_the_end_of_its_turn(name):
    family = FAMILIES[name]
    tokenizer = tokenizer_of(family)
    end, eos = tokenizer.convert_tokens_to_ids(family.specials.split()[0]), tokenizer.eos_token_id
    assert chat.end_of_turn_ids(tokenizer, [eos]) == ([end] if end == eos else [end, eos], None)
    assert chat.end_of_turn_ids(tokenizer, []) == ([end], None)

def test_a_bos_that_the_template_leaves_out_is_added_where_the_tokenizer_begins_each_text_with_it():
    without = FAMILIES["Llama 3"]._replace(template=LLAMA.replace("{{ bos_token }}", ""))
    for family in (FAMILIES["Llama 3"], without):
        assert tokenizer_of(family).decode(asked(tokenizer_of(family), turns(SYSTEM, ASK))) == family.prompt
    never = tokenizer_of(without._replace(adds_bos=False))
    assert asked(never, turns(SYSTEM, ASK)) == own_ids(never, turns(SYSTEM, ASK))
    assert never.bos_token_id not in asked(never, turns(SYSTEM, ASK))

def test_system_turns_that_a_template_leaves_out_stand_before_the_first_question():
    deaf = CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}")
    tokenizer = tokenizer_of(FAMILIES["Qwen2.5"]._replace(template=deaf))
    got = asked(tokenizer, turns(SYSTEM, "1 + 1?", "2", ASK))
    assert got == own_ids(tokenizer, turns("", f"{SYSTEM}\n\n1 + 1?", "2", ASK)[1:])

@pytest.mark.parametrize("template, stop", [
    (ALPACA, "### Instruction:"), (CHATML.replace("<|im_end|>", "[END]"), "[END]"),
    (CHATML.replace("<|im_end|>\n", "\nUSER"), "USER")])
def test_a_turn_that_ends_in_no_special_token_ends_in_a_stop_string(template, stop):
    tokenizer = tokenizer_of(FAMILIES["Qwen2.5"]._replace(template=template))
    assert chat.end_of_turn_ids(tokenizer, [7]) == ([7], stop)

@pytest.mark.parametrize("template, messages, words", [
    (None, None, "has no chat template: take --prompt r1_zero, a file with a template, or a model"),
    (GEMMA, [{"role": "user", "content": "a"}] * 2, "refuses these messages .roles have to alternate"),
    (GEMMA, turns(SYSTEM), "refuses these messages .no system turns")])
def test_what_cannot_be_asked_as_chat_is_refused_in_one_line_with_the_cure(template, messages, words):
    tokenizer = tokenizer_of(FAMILIES["Gemma 2"]._replace(template=template))
    with pytest.raises(ValueError, match=words) as error:
        chat.chat_text(tokenizer, messages or turns("", ASK)[1:])
    assert "\n" not in str(error.value) and "--prompt chat" in str(error.value)
    assert asked(tokenizer, messages) == []  # one such row does not end a run: it is dropped and counted

# --- Template files ----------------------------------------------------------------------------------------
def test_a_template_file_is_read_as_it_stands_but_for_one_newline_at_its_end(tmp_path):
    path = tmp_path / "few_shot.txt"
    shots = "Q: {1, 2}? \\boxed{3}\nQ: {question}\nA:"
    for written, want in ((shots + "\n", shots), ("{question}", "{question}"),
                          ("{question}\n\n", "{question}\n"), ("é {question}\r\nA:\r\n", "é {question}\nA:")):
        path.write_bytes(written.encode())
        assert chat.read_prompt_file(path) == want
    path.write_bytes(b"\xef\xbb\xbf{question}")  # as Windows writes it
    assert chat.read_prompt_file(str(path)) == "{question}"

@pytest.mark.parametrize("written, words", [
    (b"Q: {Question}", r"write \{question\} where"), (b"", r"write \{question\}"),
    (b"\xff {question}", "cannot be read .*UTF-8"), (None, "cannot be read .*No such file")])
def test_template_files_that_ask_nothing_are_refused_by_name(tmp_path, written, words):
    path = tmp_path / "prompt.txt"
    if written is not None:
        path.write_bytes(written)
    with pytest.raises(ValueError, match=f"^--prompt {path}:? .*{words}"):
        chat.read_prompt_file(path)
