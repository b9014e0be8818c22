#!/usr/bin/env python3
"""Makes tests/data/tokenizers/<family>/ : small tokenizers and their reference ids.

The tests never run this script and need no Python: they only read the files it
wrote. To write them again:

    python3 -m venv venv
    venv/bin/pip install torch transformers tokenizers safetensors gguf numpy sentencepiece
    venv/bin/python tests/data/make_tokenizers.py

Everything is trained here, on the docstrings of a fixed list of modules of
Python's standard library (so the merges depend on the Python version, which is
recorded) and on the sentences below. Nothing is downloaded.
"""
import importlib
import io
import inspect
import json
import os
import platform

import gguf
import numpy as np
import sentencepiece
import tokenizers
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from tokenizers import pre_tokenizers, processors, trainers

HERE = os.path.dirname(os.path.abspath(__file__))

VERSIONS = {
    "python": platform.python_version(),
    "tokenizers": tokenizers.__version__,
    "transformers": transformers.__version__,
    "sentencepiece": sentencepiece.__version__,
    "gguf": importlib.import_module("importlib.metadata").version("gguf"),
    "numpy": np.__version__,
}

# --------------------------------------------------------------------------
# training text

MODULES = (
    "argparse asyncio base64 bisect calendar codecs collections configparser "
    "contextlib copy csv datetime decimal difflib doctest email enum fractions "
    "functools getopt gettext heapq html http imaplib inspect io itertools json "
    "locale logging mailbox math optparse os pathlib pickle pprint queue random "
    "re sched selectors shelve shlex shutil smtplib socket sqlite3 ssl "
    "statistics string struct subprocess tarfile tempfile textwrap threading "
    "timeit tokenize traceback unittest urllib uuid weakref zipfile"
).split()

SENTENCES = [
    "The quick brown fox jumps over the lazy dog. It doesn't mind, and they're happy we've done it.",
    "I'll say it again: don't split the pipeline where it can't be split; he'd know, I'm sure.",
    "Each stage holds some of the layers and sends its activations to the next stage.",
    "In 2024 there were 1234567 tokens, 98.6% of them in 12 shards of 345 MB each.",
    "fn main() {\n    let x: Vec<u32> = (0..10).map(|i| i * 2).collect();\n    println!(\"{:?}\", x);\n}\n",
    "def f(x):\n\treturn x + 1  # add one\n\nfor i in range(10):\n\tprint(f(i))\n",
    "Der schnelle braune Fuchs springt über den faulen Hund. Größe, Straße, Äpfel, Öl, Übung.",
    "Le cœur déçu mais l'âme plutôt naïve, Louÿs rêva de crapaüter en canoë au delà des îles.",
    "El pingüino Wenceslao hizo kilómetros bajo exhaustiva lluvia y frío, añoraba a su querido cachorro.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю. Привет, мир!",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία. Καλημέρα κόσμε.",
    "いろはにほへと ちりぬるを。こんにちは世界。日本語のテキストです。",
    "你好，世界。今天天气很好，我们去公园散步吧。中文文本没有空格。",
    "안녕하세요 세계. 오늘은 날씨가 좋습니다.",
    "שלום עולם. מרחבא يا عالم. هذا نص باللغة العربية.",
    "नमस्ते दुनिया। यह हिन्दी में लिखा गया है। สวัสดีชาวโลก",
    "Tiếng Việt có nhiều dấu thanh. Zażółć gęślą jaźń. Příliš žluťoučký kůň.",
    "Emoji: 😀 😃 👍 🎉 🚀 👩‍💻 🇫🇷 ❤️ and so on 😀 😀 🚀 🚀.",
]


def corpus(with_docs=True):
    out = []
    if with_docs:
        for name in MODULES:
            module = importlib.import_module(name)
            docs = [module.__doc__ or ""]
            for key, value in sorted(vars(module).items()):
                if (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__ == name:
                    docs.append(value.__doc__ or "")
            out += [line for doc in docs if isinstance(doc, str) for line in doc.splitlines(keepends=True)]
    for sentence in SENTENCES:
        out += [sentence] * 12
    return out


# --------------------------------------------------------------------------
# chat templates (written for these tests)

CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3_TEMPLATE = (
    "{% set loop_messages = messages %}"
    "{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    "+ message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}"
    "{{ content }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
LLAMA2_TEMPLATE = (
    "{% for message in messages %}\n"
    "{% if message['role'] == 'user' %}\n{{ '<|user|>\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'system' %}\n{{ '<|system|>\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'assistant' %}\n{{ '<|assistant|>\n'  + message['content'] + eos_token }}\n"
    "{% endif %}\n"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n"
    "{% endfor %}"
)

# --------------------------------------------------------------------------
# the families

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# In the vocabulary of the llama3 family, but no chain of merges reaches them:
# only ignore_merges finds them.
UNREACHABLE = ["Ġzyzzyva", "xylophone", "789", "Ġqwxz"]

SMOLLM_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LLAMA3_SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>",
                  "<|end_header_id|>", "<|eot_id|>"]
QWEN2_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
QWEN2_ADDED = ["<think>", "</think>"]  # added, but not special


def train_byte_level(pre_tokenizer, normalizer, size, text, special=()):
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tok.normalizer = normalizer
    tok.train_from_iterator(text, trainers.BpeTrainer(
        vocab_size=size, show_progress=False, special_tokens=list(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())))
    model = json.loads(tok.to_str())["model"]
    return model["vocab"], [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in model["merges"]]


def special(text):
    return AddedToken(text, special=True, normalized=False)


def byte_level_family(family, size, text):
    if family == "smollm":
        pre = pre_tokenizers.Sequence([
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True)])
        vocab, merges = train_byte_level(pre, None, size, text, SMOLLM_SPECIAL)
        tok = Tokenizer(models.BPE(vocab, merges))
        tok.pre_tokenizer = pre
        tok.add_special_tokens([special(t) for t in SMOLLM_SPECIAL])
    elif family == "llama3":
        pre = pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(LLAMA3_SPLIT), "isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=False)])
        vocab, merges = train_byte_level(
            pre, None, size - len(LLAMA3_SPECIAL) - len(UNREACHABLE), text)
        for token in UNREACHABLE:
            assert token not in vocab, token
            vocab[token] = len(vocab)
        tok = Tokenizer(models.BPE(vocab, merges, ignore_merges=True))
        tok.pre_tokenizer = pre
        tok.add_special_tokens([special(t) for t in LLAMA3_SPECIAL])
        bos = "<|begin_of_text|>"
        tok.post_processor = processors.Sequence([
            processors.ByteLevel(trim_offsets=True, add_prefix_space=True, use_regex=True),
            processors.TemplateProcessing(
                single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1",
                special_tokens=[(bos, tok.token_to_id(bos))])])
    elif family == "qwen2":
        pre = pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(QWEN2_SPLIT), "isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)])
        vocab, merges = train_byte_level(
            pre, normalizers.NFC(), size - len(QWEN2_SPECIAL) - len(QWEN2_ADDED), text)
        tok = Tokenizer(models.BPE(vocab, merges))
        tok.normalizer = normalizers.NFC()
        tok.pre_tokenizer = pre
        tok.add_special_tokens([special(t) for t in QWEN2_SPECIAL])
        tok.add_tokens([AddedToken(t, special=False, normalized=False) for t in QWEN2_ADDED])
        tok.post_processor = processors.ByteLevel(
            trim_offsets=False, add_prefix_space=False, use_regex=False)
    else:
        raise ValueError(family)
    tok.decoder = decoders.ByteLevel(add_prefix_space=True, trim_offsets=True, use_regex=True)
    return tok, None


def llama2_family(size, text, coverage):
    """A SentencePiece BPE model, brought into tokenizer.json the usual way:
    every way to split a piece into two other pieces becomes a merge, ordered
    by the score of the piece."""
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([t.rstrip("\n") for t in text if t.strip()]), model_writer=out,
        model_type="bpe", vocab_size=size, byte_fallback=True, character_coverage=coverage,
        split_digits=True, normalization_rule_name="identity", add_dummy_prefix=True,
        remove_extra_whitespaces=False, allow_whitespace_only_pieces=True,
        unk_id=0, bos_id=1, eos_id=2, pad_id=-1, num_threads=1, minloglevel=2,
        max_sentence_length=1 << 20)
    sp = sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())
    pieces = [sp.id_to_piece(i) for i in range(sp.vocab_size())]
    scores = [sp.get_score(i) for i in range(sp.vocab_size())]
    vocab = {p: i for i, p in enumerate(pieces)}
    merges = []
    for i, piece in enumerate(pieces):
        if i < 259:
            continue
        local = [(piece[:k], piece[k:]) for k in range(1, len(piece))
                 if piece[:k] in vocab and piece[k:] in vocab]
        local.sort(key=lambda m: (vocab[m[0]], vocab[m[1]]))
        merges += [(scores[i], i, m) for m in local]
    merges = [m for _, _, m in sorted(merges, key=lambda x: (-x[0], x[1]))]
    tok = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tok.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tok.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
        decoders.Strip(content=" ", left=1, right=0)])
    tok.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)])
    tok.add_special_tokens([special(t) for t in ("<unk>", "<s>", "</s>")])
    return tok, (sp, scores)


FAMILIES = {
    "smollm": dict(size=800, bos="<|im_start|>", eos="<|im_end|>", pad="<|im_end|>", unk="<|endoftext|>",
                   add_bos=None, cls="GPT2Tokenizer", template=CHATML, model="gpt2", pre="smollm"),
    "llama3": dict(size=900, bos="<|begin_of_text|>", eos="<|eot_id|>", pad=None, unk=None,
                   add_bos=None, cls="PreTrainedTokenizerFast", template=LLAMA3_TEMPLATE,
                   model="gpt2", pre="llama-bpe"),
    "qwen2": dict(size=850, bos=None, eos="<|im_end|>", pad="<|endoftext|>", unk=None,
                  add_bos=False, cls="Qwen2Tokenizer", template=CHATML, model="gpt2", pre="qwen2"),
    "llama2": dict(size=1000, bos="<s>", eos="</s>", pad="</s>", unk="<unk>",
                   add_bos=True, cls="LlamaTokenizer", template=LLAMA2_TEMPLATE,
                   model="llama", pre="default"),
}


def build(family, size=None, small=False):
    """The tokenizer of a family; `small` ones (for the tiny checkpoints) are
    trained on the docstrings and the plain English sentences only."""
    size = size or FAMILIES[family]["size"]
    text = corpus() if not small else corpus()[: -12 * len(SENTENCES)] + SENTENCES[:6] * 12
    if family == "llama2":
        return llama2_family(size, text, 0.9995 if not small else 0.999)
    return byte_level_family(family, size, text)


def tokenizer_config(family, tok, template):
    spec = FAMILIES[family]
    added = json.loads(tok.to_str())["added_tokens"]
    config = {}
    if spec["add_bos"] is not None:
        config["add_bos_token"] = spec["add_bos"]
        config["add_eos_token"] = False
    config["added_tokens_decoder"] = {
        str(t["id"]): {k: t[k] for k in ("content", "lstrip", "normalized", "rstrip", "single_word", "special")}
        for t in added}
    config["bos_token"] = spec["bos"]
    if template is not None:
        config["chat_template"] = template
    config.update(clean_up_tokenization_spaces=False, eos_token=spec["eos"], model_max_length=2048,
                  pad_token=spec["pad"], tokenizer_class=spec["cls"], unk_token=spec["unk"])
    if family == "llama2":
        config["legacy"] = False
    return config


def write_json(path, value, **kw):
    with open(path, "w", encoding="utf-8") as f:
        json.dump(value, f, ensure_ascii=False, **kw)
        f.write("\n")


def save(folder, family, tok, template_file=False):
    """tokenizer.json and tokenizer_config.json (and chat_template.jinja)."""
    os.makedirs(folder, exist_ok=True)
    template = FAMILIES[family]["template"]
    data = json.loads(tok.to_str())
    if family in ("smollm", "llama2"):  # the older way to write merges: "a b", not ["a", "b"]
        data["model"]["merges"] = [" ".join(m) for m in data["model"]["merges"]]
    write_json(os.path.join(folder, "tokenizer.json"), data, separators=(",", ":"))
    assert Tokenizer.from_file(os.path.join(folder, "tokenizer.json")).to_str() == tok.to_str()
    write_json(os.path.join(folder, "tokenizer_config.json"),
               tokenizer_config(family, tok, None if template_file else template), indent=2)
    if template_file:
        with open(os.path.join(folder, "chat_template.jinja"), "w", encoding="utf-8") as f:
            f.write(template)


def add_gguf_tokenizer(writer, family, tok, sp=None):
    """tokenizer.* keys, as llama.cpp's converter writes them."""
    spec = FAMILIES[family]
    data = json.loads(tok.to_str())
    added = {t["id"]: t for t in data["added_tokens"]}
    n = tok.get_vocab_size(with_added_tokens=True)
    tokens, types = [], []
    for i in range(n):
        token = tok.id_to_token(i)
        assert token is not None, i
        tokens.append(token)
        if family == "llama2":
            kind = (gguf.TokenType.UNKNOWN if i == 0 else gguf.TokenType.CONTROL if i < 3
                    else gguf.TokenType.BYTE if i < 259 else gguf.TokenType.NORMAL)
        elif i in added:
            kind = gguf.TokenType.CONTROL if added[i]["special"] else gguf.TokenType.USER_DEFINED
        else:
            kind = gguf.TokenType.NORMAL
        types.append(int(kind))
    writer.add_tokenizer_model(spec["model"])
    writer.add_tokenizer_pre(spec["pre"])
    writer.add_token_list(tokens)
    if family == "llama2":
        writer.add_token_scores([float(s) for s in sp[1]])
    writer.add_token_types(types)
    if family != "llama2":
        merges = [m if isinstance(m, str) else " ".join(m) for m in data["model"]["merges"]]
        writer.add_token_merges(merges)
    if spec["bos"] is not None:
        writer.add_bos_token_id(tok.token_to_id(spec["bos"]))
    elif family == "qwen2":  # as the converter does for Qwen2
        writer.add_bos_token_id(tok.token_to_id("<|endoftext|>"))
    writer.add_eos_token_id(tok.token_to_id(spec["eos"]))
    if spec["unk"] is not None:
        writer.add_unk_token_id(tok.token_to_id(spec["unk"]))
    if spec["pad"] is not None:
        writer.add_pad_token_id(tok.token_to_id(spec["pad"]))
    writer.add_add_bos_token({"smollm": False, "llama3": True, "qwen2": False, "llama2": True}[family])
    if family == "llama2":
        writer.add_add_space_prefix(True)
    writer.add_chat_template(spec["template"])
    return n


# --------------------------------------------------------------------------
# the strings

TEXTS = [
    "",
    " ",
    "  ",
    "     ",
    "\n",
    "\n\n\n",
    "\t",
    "\t\t \t",
    " \n \n",
    "a",
    " a",
    "  a",
    "   leading and trailing   ",
    "Hello, world!",
    "Hello  world   with    many     spaces",
    "The quick brown fox jumps over the lazy dog.",
    "don't I'LL we'Ve THEY'RE it's 'tis y'all 'S 'd' o'clock I'm",
    "don’t use “curly” quotes – or em—dashes…",
    "1234567890",
    "3.14159 and 1,000,000 and 0xDEADBEEF and 1e-10",
    "x1y22z333w4444 12a34b 2024-05-06T07:08:09Z",
    "٠١٢٣٤٥ ¼ ½ ² ³ Ⅷ ①",
    "line one\nline two\r\nline three\rline four\n\n  indented",
    "trailing newline\n",
    "trailing spaces   \n   next",
    "text \t\ttabs\tand spaces \t end",
    "def f(x):\n    if x > 0:\n        return x ** 2\n\treturn -x  # comment\n",
    "fn main() { let v: Vec<u8> = vec![1, 2, 3]; println!(\"{:?}\", v); }",
    "{\"key\": [1, 2, {\"nested\": null}], \"url\": \"https://example.com/a?b=c&d=%20\"}",
    "<html><body class='x'>&nbsp;</body></html>",
    "!!!???...,,,;;;:::---___===+++***///\\\\\\|||~~~```^^^",
    "a_b-c.d/e\\f@g#h$i%j^k&l*m(n)o",
    "héllo wörld naïve café",
    "he\u0301llo wo\u0308rld nai\u0308ve cafe\u0301",
    "\u1e9b\u0323 \ufb01 \u212b \u2126 \uac00 \u1100\u1161 \u0344",
    "Z\u0351\u036b\u0343\u036a\u0302\u036b\u033d\u034f\u0334\u0319\u0324\u031e\u0349\u035a\u032f\u031e\u0320\u034dA\u036b\u0357\u0334\u0362\u0335\u031c\u0330\u0354L\u0368\u0367\u0369\u0358\u0320G\u0311\u0357\u030e\u0305\u035b\u0341\u0334\u033b\u0348\u034d\u0354\u0339O",
    "Привет, мир! Съешь ещё этих мягких булок.",
    "Καλημέρα κόσμε",
    "你好，世界！今天天气很好。",
    "こんにちは世界。カタカナ・ひらがな・漢字、ｶﾀｶﾅ　全角　スペース",
    "안녕하세요 세계",
    "한국어 NFD: \u1112\u1161\u11ab\u1100\u116e\u11a8",
    "שלום עולם — مرحبا بالعالم ‏RTL‎ mark",
    "नमस्ते दुनिया क्षत्रिय",
    "สวัสดีชาวโลก",
    "İstanbul ıĞğ ǅ ß ẞ ſ K ΐ",
    "😀😃👍🏽 👩‍💻 👨‍👩‍👧‍👦 🏳️‍🌈 🇫🇷🇩🇪🇯🇵 ❤️ ☃ 🧑🏿‍🚀",
    "text😀text 🚀\n🚀",
    "zero\u200bwidth\u200cnon\u200djoiner\ufeffbom\u2060word",
    "nbsp\u00a0here\u2003em\u3000ideographic\u2028line\u2029para\u0085nel",
    "control \u0000\u0001\u0007\u0008\u000b\u000c\u001b[0m\u007f\u009f end",
    "private \ue000\uf8ff and non-char \ufffe\uffff and \U0010ffff and \ufffd",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝟙𝟚𝟛 𐍈 𠜎𠜱",
    "antidisestablishmentarianism" * 6,
    "a" * 300,
    "ab " * 60,
    "= " * 20 + "=" * 70,
    " " * 40 + "x" + " " * 17,
    "\n" * 10 + " " * 5 + "\n" * 3 + "end",
    "zyzzyva xylophone zyzzyvas xylophones qwxz 789 7890 a789",
    "ASCII UPPER CASE WORDS AND camelCaseWords and snake_case_words",
    "▁ already ▁has▁ the ▁▁ mark and Ġ too Ċ",
    "<0x0A> <0xFF> is text, not a byte",
    "<|endoftext|>",
    "before<|endoftext|>after",
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\n",
    "a <|im_start|> b<|im_end|> c <|im_end|><|im_end|>",
    "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi <b>there</b>!<|eot_id|> <|end_of_text|>",
    "<s>[INST] Hello </s> <unk> [/INST]</s>",
    " <s> x</s>y <s>",
    "<think>\nhmm\n</think>\n\nanswer <think>",
    "<|im_start <|im_end| |> <|endoftext|",
    "<｜not｜> <|unknown_token|> <|IM_START|>",
]

CHATS = [
    [{"role": "user", "content": "Hi!"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "  What is 2+2?  "}],
    [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi there."},
     {"role": "user", "content": "Tell me about “pipelines” 🚀\nand <|im_end|> stages"}],
]


def cases(tok):
    out = []
    for text in TEXTS:
        tok.encode_special_tokens = False
        ids = tok.encode(text, add_special_tokens=False).ids
        ids_with = tok.encode(text, add_special_tokens=True).ids
        tok.encode_special_tokens = True
        plain = tok.encode(text, add_special_tokens=False).ids
        tok.encode_special_tokens = False
        out.append({
            "text": text, "ids_no_special": ids, "ids_with_special": ids_with, "ids_plain": plain,
            "decoded": tok.decode(ids, skip_special_tokens=False),
            "decoded_with_special": tok.decode(ids_with, skip_special_tokens=False),
            "decoded_skip_special": tok.decode(ids_with, skip_special_tokens=True),
        })
    return out


def write_cases(path, key, versions, items):
    """One case a line, so that a difference can be read."""
    with open(path, "w", encoding="utf-8") as f:
        f.write('{"versions": ' + json.dumps(versions) + ',\n"%s": [\n' % key)
        f.write(",\n".join(json.dumps(c, ensure_ascii=True) for c in items))
        f.write("\n]}\n")


def main():
    for family, spec in FAMILIES.items():
        folder = os.path.join(HERE, "tokenizers", family)
        tok, sp = build(family)
        save(folder, family, tok)
        # from here on, only what was saved
        tok = Tokenizer.from_file(os.path.join(folder, "tokenizer.json"))
        write_cases(os.path.join(folder, "ids.json"), "cases", VERSIONS, cases(tok))
        fast = transformers.PreTrainedTokenizerFast(
            tokenizer_file=os.path.join(folder, "tokenizer.json"), bos_token=spec["bos"],
            eos_token=spec["eos"], chat_template=spec["template"])
        chats = []
        for messages in CHATS:
            for add in (False, True):
                text = fast.apply_chat_template(messages, tokenize=False, add_generation_prompt=add)
                chats.append({"messages": messages, "add_generation_prompt": add, "text": text,
                              "ids_no_special": tok.encode(text, add_special_tokens=False).ids})
        write_cases(os.path.join(folder, "chat.json"), "cases", VERSIONS, chats)

        w = gguf.GGUFWriter(os.path.join(folder, "vocab.gguf"), "llama")
        w.add_name("tokenizer fixture " + family)
        w.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
        w.add_quantization_version(gguf.GGML_QUANT_VERSION)
        w.add_block_count(1)
        w.add_context_length(512)
        w.add_embedding_length(32)
        w.add_feed_forward_length(32)
        w.add_head_count(1)
        w.add_head_count_kv(1)
        w.add_key_length(64)
        w.add_value_length(64)
        w.add_rope_dimension_count(64)
        w.add_rope_freq_base(10000.0)
        w.add_layer_norm_rms_eps(1e-5)
        n = tok.get_vocab_size(with_added_tokens=True)
        w.add_vocab_size(n)
        add_gguf_tokenizer(w, family, tok, sp)
        zero = gguf.quants.quantize(np.zeros((n, 32), np.float32), gguf.GGMLQuantizationType.Q8_0)
        w.add_tensor("token_embd.weight", zero, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        w.write_header_to_file()
        w.write_kv_data_to_file()
        w.write_tensors_to_file()
        w.close()
        print(family, n, "tokens", len(TEXTS), "texts")
        if family == "llama2":
            # For text without special tokens SentencePiece itself must agree.
            differ = []
            for text in TEXTS:
                want = sp[0].encode(text)
                tok.encode_special_tokens = True
                got = tok.encode(text, add_special_tokens=False).ids
                if want != got:
                    differ.append(text)
            print("  texts where SentencePiece and tokenizer.json differ:", differ)


if __name__ == "__main__":
    main()
