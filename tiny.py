"""The stand-in base model and its two tasks, for a machine without a GPU and a reader without a model.

`--model tiny` is a Qwen2 of .13M parameters in an ordinary HF folder. Its pre-training text is a mixture, a
few careful solutions among many poor ones: it can do the task and seldom does, and reinforcement learning has
to find the behaviour that pays. The tasks: add four digits (`arithmetic`), or sort them (`sort`).
"""
import itertools
import os
import random
import shutil
import time
import zlib
from pathlib import Path

TASKS = ("arithmetic", "sort")
STYLES = dict(careful=0.13, checked=0.1, guess=0.37, ramble=0.2, untagged=0.2)  # share of each in the text
CONFIG = dict(hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=2,
              num_key_value_heads=2, max_position_embeddings=2048, tie_word_embeddings=True)
TEXTS, BATCH_SIZE, LR = 44_000, 32, 5e-3

def worked_steps(task, digits, rng=None, slip=0.0):
    """-> (worked steps, answer). A step puts the next digit into the result so far, by adding it or by
    inserting it in order, and goes wrong with probability `slip`."""
    state, steps = digits[:1], []
    for digit in digits[1:]:
        slips = rng is not None and rng.random() < slip
        if task == "arithmetic":
            after = [str(max(0, int(state[0]) + int(digit) + (rng.choice([-2, -1, 1, 2]) if slips else 0)))]
        else:
            after = rng.sample([*state, digit], len(state) + 1) if slips else sorted([*state, digit])
        steps.append(f"{' '.join(state)} + {digit} = {' '.join(after)}")
        state = after
    return " , ".join(steps), " ".join(state)

def solution(task, digits, style, rng=None):
    """A response in one of STYLES."""
    steps, answer = worked_steps(task, digits)
    if style == "untagged":
        return f" {steps} . the answer is {answer}"
    if style == "checked":
        steps = f"{steps} . check : {steps}"
    if style == "guess":
        near = str(max(0, sum(map(int, digits)) + rng.randint(-6, 6)))
        steps, answer = "", near if task == "arithmetic" else " ".join(rng.sample(digits, len(digits)))
    if style == "ramble":
        (first, _), (second, answer) = (worked_steps(task, digits, rng, slip=0.3) for _ in range(2))
        steps = f"hmm , {first} . wait , {second}".replace("=", "is")
    return f" {steps}".rstrip() + f" </think> <answer> {answer} </answer>"

def task_records(task):
    """All 2,401 questions of four digits from 0 to 6, in a fixed order -> {"train": 1,801 records (dicts),
    "test": 600}, in the form that any data file may have."""
    questions = random.Random(0).sample(list(itertools.product("0123456", repeat=4)), 7**4)
    text, join = ("What is {} ?", " + ") if task == "arithmetic" else ("Sort {} .", " ")
    records = [dict(question=text.format(join.join(digits)), ground_truth=worked_steps(task, digits)[1],
                    trace=solution(task, digits, "careful")) for digits in map(list, questions)]
    return {"train": records[600:], "test": records[:600]}

def tiny_tokenizer(template):
    """Bytes, and one token for each word of the tasks and each fixed part of the prompt `template`: a prompt
    costs about 15 tokens, byte for byte the same text. pad is eos, as in many real models."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    alphabet = ["<|endoftext|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    words = "What is Sort + = , . : ? check hmm wait the answer".split() + [str(n) for n in range(60)]
    parts = [part.strip(" ") for part in template.split("{question}")]
    for text in parts + ["<think>", "</think>", "<answer>", "</answer>"] + [f" {word}" for word in words]:
        tokenizer.add_tokens([AddedToken(text, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=alphabet[0], pad_token=alphabet[0])

def pretraining_texts(task, template, tokenizer):
    """-> (prompt ids, response ids) each. Sound solutions first, then more and more of STYLES."""
    rng, pairs = random.Random(1), []
    questions = [record["question"] for record in task_records(task)["train"]]
    prompts = {question: tokenizer.encode(template.replace("{question}", question)) for question in questions}
    for n in range(TEXTS):
        question = rng.choice(questions)
        styles = STYLES if rng.random() < (n / TEXTS - 0.5) / 0.25 else {"careful": 0.8, "untagged": 0.2}
        style = rng.choices(list(styles), list(styles.values()))[0]
        text = solution(task, [c for c in question if c.isdigit()], style, rng)
        pairs.append((prompts[question], tokenizer.encode(text) + [tokenizer.eos_token_id]))
    return pairs

def pretrain(task, template, tokenizer):
    """-> the tiny model, trained on pretraining_texts; always the same with the same number of threads."""
    import torch
    from torch.nn.utils.rnn import pad_sequence
    from tqdm import tqdm
    from transformers import Qwen2Config, Qwen2ForCausalLM
    pairs = pretraining_texts(task, template, tokenizer)
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id,
                                         pad_token_id=tokenizer.pad_token_id, bos_token_id=None, **CONFIG))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    for start in tqdm(range(0, TEXTS, BATCH_SIZE), desc="warm start", disable=None, leave=False):
        optimizer.param_groups[0]["lr"] = LR * min(1.0, start / 640 + 0.05, 1.02 - start / TEXTS)
        batch = pairs[start:start + BATCH_SIZE]
        ids = pad_sequence([torch.tensor(prompt + response) for prompt, response in batch], True, 0)
        labels = [torch.tensor([-100] * len(prompt) + response) for prompt, response in batch]
        optimizer.zero_grad()
        model(ids, labels=pad_sequence(labels, True, -100)).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model

def warm_start(dataset, template):
    """The HF folder of the tiny model for a built-in task (other data: `arithmetic`), made at the first call,
    in about a minute, and kept in NANO_GRPO_CACHE or ~/.cache/nano_grpo. OSError if it cannot be kept."""
    task = dataset if dataset in TASKS else TASKS[0]
    cache = Path(os.environ.get("NANO_GRPO_CACHE") or os.path.expanduser("~/.cache/nano_grpo"))
    if cache.parts[0] == "~":
        raise OSError("there is no home folder: set NANO_GRPO_CACHE to a folder for the tiny model")
    recipe = Path(__file__).read_bytes() + template.encode()  # a changed recipe is a new model
    folder = cache / f"tiny-{task}-{zlib.crc32(recipe):08x}"
    if folder.exists():
        return folder
    unfinished = folder.with_name(f"tmp-{folder.name}-{os.getpid()}")
    try:
        unfinished.mkdir(parents=True)  # before the minute is spent
    except OSError as error:
        raise OSError(f"--model tiny cannot be kept in {cache} ({error.strerror}): set NANO_GRPO_CACHE to a "
                      "folder that can be written to") from error
    print(f"warm start: pre-training the tiny model on {TEXTS:,} texts about {task}, once, into {folder}")
    started, tokenizer = time.time(), tiny_tokenizer(template)
    try:
        pretrain(task, template, tokenizer).save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        os.rename(unfinished, folder)
    except OSError:
        if not folder.exists():  # else another first run, beside this one, was quicker
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    print(f"warm start: done in {time.time() - started:.0f} s")
    return folder
