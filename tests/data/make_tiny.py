#!/usr/bin/env python3
"""Makes tests/data/tiny/, tests/data/tiny-gguf/ and tests/data/quants/.

The tests never run this script and need no Python: they only read the files it
wrote. To write them again:

    python3 -m venv venv
    venv/bin/pip install torch transformers tokenizers safetensors gguf numpy sentencepiece
    venv/bin/python tests/data/make_tiny.py            # write everything, then check it
    venv/bin/python tests/data/make_tiny.py --check    # only check what is there

The weights come from numpy's PCG64 with a fixed seed for each model; nothing is
trained and nothing is downloaded. The reference logits come from transformers,
in float32 on the CPU with eager attention, from the weights as they were saved
(for the GGUF files: as gguf.quants.dequantize reads them back). The checkpoints
are random, so their text means nothing; they were scaled so that attention is
far from uniform and every bias, norm weight and rope setting shows in the logits.
"""
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import shutil
import sys
import warnings

import gguf
import numpy as np
import torch
import transformers
from gguf.quants import dequantize, quantize
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

import make_tokenizers as mt

HERE = os.path.dirname(os.path.abspath(__file__))
TINY = os.path.join(HERE, "tiny")
TINY_GGUF = os.path.join(HERE, "tiny-gguf")
QUANTS = os.path.join(HERE, "quants")
Q = gguf.GGMLQuantizationType

VERSIONS = {"python": platform.python_version(), "torch": torch.__version__.split("+")[0],
            "transformers": transformers.__version__, "gguf": importlib.metadata.version("gguf"),
            "numpy": np.__version__, "tokenizers": mt.VERSIONS["tokenizers"]}

torch.set_num_threads(1)
torch.set_grad_enabled(False)
transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()
warnings.simplefilter("ignore")

GREEDY = 16
TOKENIZER_SIZE = 384
LLAMA3_ROPE = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 32, "rope_type": "llama3"}


def spec(arch="llama", hidden=64, inter=96, layers=2, heads=2, kv=1, hd=64, vocab=TOKENIZER_SIZE,
         tied=False, dtype="float16", bias=False, rope=None, theta=10000.0, eps=1e-5, tok=None,
         explicit_hd=True, long=40, **kw):
    if tok is None:
        tok = {"llama": "smollm", "qwen2": "qwen2", "qwen3": "qwen2"}[arch]
    return dict(arch=arch, hidden=hidden, inter=inter, layers=layers, heads=heads, kv=kv, hd=hd,
                vocab=vocab, tied=tied, dtype=dtype, bias=bias, rope=rope, theta=theta, eps=eps,
                tok=tok, explicit_hd=explicit_hd, long=long, **kw)


HF = {
    "llama-tied": spec(hidden=96, inter=128, heads=3, kv=1, tied=True, dtype="bfloat16"),
    "llama-untied": spec(inter=72, heads=2, kv=2, dtype="float32", bias=True, tok="llama2", template_file=True),
    "llama-33": spec(hidden=32, inter=48, layers=33, heads=1, kv=1, tied=True),
    "llama-sharded": spec(hidden=128, heads=2, kv=2, explicit_hd=False, shards=3, eps=1e-6),
    "llama3-rope": spec(heads=4, kv=2, rope=LLAMA3_ROPE, theta=500000.0, dtype="bfloat16", tok="llama3",
                        long=100),
    "llama-linear-rope": spec(rope={"type": "linear", "factor": 2.0}, layers=3),
    "llama-hd80": spec(hidden=48, inter=80, hd=80, heads=3, kv=3),
    "llama-hd96": spec(hd=96, heads=2, kv=1, v5_config=True, dtype="bfloat16", theta=50000.0),
    "llama-hd128": spec(hd=128, heads=4, kv=1),
    "llama-hd256": spec(hd=256, heads=2, kv=1, inter=64),
    "qwen2-tied": spec("qwen2", hidden=128, heads=2, kv=1, vocab=400, tied=True, dtype="bfloat16",
                       theta=1000000.0, eps=1e-6, explicit_hd=False),
    "qwen2-untied": spec("qwen2", hidden=96, heads=3, kv=3, vocab=400, dtype="float16",
                         theta=1000000.0, eps=1e-6),
    "qwen3": spec("qwen3", hd=128, heads=4, kv=2, vocab=400, tied=True, dtype="bfloat16",
                  theta=1000000.0, eps=1e-6),
}

GGUF = {
    "llama-f32": spec(kind=Q.F32, layers=1),
    "llama-f16": spec(kind=Q.F16),
    "llama-bf16": spec(kind=Q.BF16, tied=True),
    "llama-q4_0": spec(kind=Q.Q4_0),
    "llama-q4_1": spec(kind=Q.Q4_1, hidden=96, heads=3, kv=3),
    "llama-q5_0": spec(kind=Q.Q5_0, tok="llama2"),
    "llama-q5_1": spec(kind=Q.Q5_1, alignment=64),
    "llama-q8_0": spec(kind=Q.Q8_0, tok="llama3", theta=500000.0),
    "llama-q4_k": spec(kind=Q.Q4_K, hidden=256, inter=256, layers=1, heads=4, kv=2),
    "llama-q5_k": spec(kind=Q.Q5_K, hidden=256, inter=256, layers=1, heads=4, kv=1, tied=True),
    "llama-q6_k": spec(kind=Q.Q6_K, hidden=256, inter=256, layers=1, heads=4, kv=2, tied=True,
                       lengths=False),
    "mixed-k-qwen2": spec("qwen2", kind=Q.Q4_K, hidden=256, inter=256, layers=2, heads=4, kv=1, tied=True,
                          theta=1000000.0, eps=1e-6, mixed=True),
    "qwen3-q8": spec("qwen3", kind=Q.Q8_0, hd=128, heads=4, kv=2, theta=1000000.0, eps=1e-6),
    "llama3-rope-factors": spec(kind=Q.F16, heads=4, kv=2, rope=LLAMA3_ROPE, theta=500000.0, tok="llama3",
                                long=100),
    "split": spec(kind=Q.Q8_0, layers=3, split=True),
}

FTYPE = {Q.F32: "ALL_F32", Q.F16: "MOSTLY_F16", Q.BF16: "MOSTLY_BF16", Q.Q4_0: "MOSTLY_Q4_0",
         Q.Q4_1: "MOSTLY_Q4_1", Q.Q5_0: "MOSTLY_Q5_0", Q.Q5_1: "MOSTLY_Q5_1", Q.Q8_0: "MOSTLY_Q8_0",
         Q.Q4_K: "MOSTLY_Q4_K_M", Q.Q5_K: "MOSTLY_Q5_K_M", Q.Q6_K: "MOSTLY_Q6_K"}


def rng_for(name):
    return np.random.Generator(np.random.PCG64(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")))


# --------------------------------------------------------------------------
# random weights

def shapes(s):
    """name -> (shape, standard deviation); None for a norm weight."""
    h, i, q, kv = s["hidden"], s["inter"], s["heads"] * s["hd"], s["kv"] * s["hd"]
    out = {"model.embed_tokens.weight": ((s["vocab"], h), 3.0 / math.sqrt(h))}
    for n in range(s["layers"]):
        p = f"model.layers.{n}."
        out[p + "input_layernorm.weight"] = ((h,), None)
        for name, rows, cols, gain in (
                ("self_attn.q_proj", q, h, 1.5), ("self_attn.k_proj", kv, h, 1.5),
                ("self_attn.v_proj", kv, h, 1.2), ("self_attn.o_proj", h, q, 1.2)):
            out[p + name + ".weight"] = ((rows, cols), gain / math.sqrt(cols))
            if (s["arch"] == "qwen2" and name[-6] != "o") or s["bias"]:
                out[p + name + ".bias"] = ((rows,), 0.5 if name[-6] != "o" else 0.3)
        if s["arch"] == "qwen3":
            out[p + "self_attn.q_norm.weight"] = ((s["hd"],), None)
            out[p + "self_attn.k_norm.weight"] = ((s["hd"],), None)
        out[p + "post_attention_layernorm.weight"] = ((h,), None)
        out[p + "mlp.gate_proj.weight"] = ((i, h), 1.5 / math.sqrt(h))
        out[p + "mlp.up_proj.weight"] = ((i, h), 1.2 / math.sqrt(h))
        out[p + "mlp.down_proj.weight"] = ((h, i), 1.2 / math.sqrt(i))
    out["model.norm.weight"] = ((h,), None)
    if not s["tied"]:
        out["lm_head.weight"] = ((s["vocab"], h), 3.0 / math.sqrt(h))
    return out


def random_tensor(rng, shape, std, name=""):
    if std is None:
        center = 1.3 if name.endswith(("q_norm.weight", "k_norm.weight")) else 1.0
        return (center * rng.uniform(0.7, 1.3, shape)).astype(np.float32)
    return (std * rng.standard_normal(shape)).astype(np.float32)


def random_weights(s, name):
    rng = rng_for(name)
    return {k: random_tensor(rng, shape, std, k) for k, (shape, std) in shapes(s).items()}


# --------------------------------------------------------------------------
# Hugging Face folders

def eos_bos(s, tok):
    f = mt.FAMILIES[s["tok"]]
    eos = tok.token_to_id(f["eos"])
    if s["tok"] == "llama3":
        eos = [tok.token_to_id("<|end_of_text|>"), eos]
    bos = tok.token_to_id(f["bos"] or "<|endoftext|>")
    return bos, eos


def hf_config(s, bos, eos):
    c = {"architectures": [{"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM",
                            "qwen3": "Qwen3ForCausalLM"}[s["arch"]]]}
    if s["arch"] != "qwen2":
        c["attention_bias"] = s["bias"]
    c.update(attention_dropout=0.0, bos_token_id=bos, eos_token_id=eos)
    if s["explicit_hd"]:
        c["head_dim"] = s["hd"]
    else:
        assert s["hidden"] == s["heads"] * s["hd"]
    c.update(hidden_act="silu", hidden_size=s["hidden"], initializer_range=0.02,
             intermediate_size=s["inter"], max_position_embeddings=256)
    if s["arch"] == "llama":
        c["mlp_bias"] = False
    else:
        c["max_window_layers"] = s["layers"]
    c.update(model_type=s["arch"], num_attention_heads=s["heads"], num_hidden_layers=s["layers"],
             num_key_value_heads=s["kv"])
    if s["arch"] == "llama":
        c["pretraining_tp"] = 1
    c["rms_norm_eps"] = s["eps"]
    if s.get("v5_config"):  # as transformers 5 writes it
        c["rope_parameters"] = {"rope_theta": s["theta"], "rope_type": "default"}
    else:
        c.update(rope_scaling=s["rope"], rope_theta=s["theta"])
    if s["arch"] != "llama":
        c.update(sliding_window=None, use_sliding_window=False)
    c["tie_word_embeddings"] = s["tied"]
    c["dtype" if s.get("v5_config") else "torch_dtype"] = s["dtype"]
    c.update(use_cache=True, vocab_size=s["vocab"])
    return c


def small_tokenizer(s, cache={}):
    if s["tok"] not in cache:
        cache[s["tok"]] = mt.build(s["tok"], TOKENIZER_SIZE, small=True)
    return cache[s["tok"]]


def write_hf(name, s):
    folder = os.path.join(TINY, name)
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    tok, _ = small_tokenizer(s)
    assert tok.get_vocab_size() <= s["vocab"]
    mt.save(folder, s["tok"], tok, template_file=s.get("template_file", False))
    bos, eos = eos_bos(s, tok)
    mt.write_json(os.path.join(folder, "config.json"), hf_config(s, bos, eos), indent=2)
    mt.write_json(os.path.join(folder, "generation_config.json"),
                  {"_from_model_config": True, "bos_token_id": bos, "eos_token_id": eos}, indent=2)
    tensors = {k: torch.from_numpy(v).to(getattr(torch, s["dtype"])) for k, v in random_weights(s, name).items()}
    n = s.get("shards", 1)
    if n == 1:
        save_file(tensors, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})
        os.chmod(os.path.join(folder, "model.safetensors"), 0o644)
    else:
        total = sum(t.nbytes for t in tensors.values())
        shards, seen = [{} for _ in range(n)], 0
        for k, t in tensors.items():
            shards[min(n - 1, seen * n // total)][k] = t
            seen += t.nbytes
        weight_map = {}
        for i, shard in enumerate(shards):
            assert shard
            file = f"model-{i + 1:05}-of-{n:05}.safetensors"
            save_file(shard, os.path.join(folder, file), metadata={"format": "pt"})
            os.chmod(os.path.join(folder, file), 0o644)
            weight_map.update({k: file for k in shard})
        mt.write_json(os.path.join(folder, "model.safetensors.index.json"),
                      {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}, indent=2)
    return folder


def load_hf(folder):
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


# --------------------------------------------------------------------------
# goldens

def logits_of(model, ids):
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def greedy(model, ids, n=GREEDY):
    """Greedy ids and the distance to the second best, with a KV cache."""
    out, margins = [], []
    step = model(input_ids=torch.tensor([ids]), use_cache=True)
    while True:
        top = torch.topk(step.logits[0, -1], 2)
        out.append(int(top.indices[0]))
        margins.append(float(top.values[0] - top.values[1]))
        if len(out) == n:
            return out, margins
        step = model(input_ids=torch.tensor([out[-1:]]), past_key_values=step.past_key_values, use_cache=True)


def sig(x, digits=7):
    return float(f"{float(x):.{digits}g}")


def case(model, ids, text=None):
    logits = logits_of(model, ids)
    logp = torch.log_softmax(logits.double(), dim=-1)
    token_logp = [float(logp[i, t]) for i, t in enumerate(ids[1:])]
    out, margins = greedy(model, ids)
    c = {} if text is None else {"text": text}
    c.update(ids=ids, logits_last=[sig(x) for x in logits[-1]], max_abs_logit=sig(logits.abs().max()),
             nll=-math.fsum(token_logp), token_logprobs=[sig(x, 9) for x in token_logp],
             greedy_ids=out, margins=[sig(m, 6) for m in margins])
    return c


WORDS = ("the a pipeline stage layer model tokens request server file string object value list of and "
         "to in is not error return name type with from run stop hello world").split()


def goldens(model, s, name, tok, bos):
    """Two prompts, chosen among random ones so that no greedy step is close."""
    rng = rng_for(name + "/prompts")
    add_bos = [bos] if s["tok"] in ("llama2", "llama3") else []
    best = []
    for kind in ("text", "random"):
        found = None
        for _ in range(40 if s["layers"] < 10 else 25):
            text = None
            if kind == "text":
                while True:
                    words = rng.choice(WORDS, rng.integers(1, 4))
                    text = " ".join(words).capitalize()
                    ids = tok.encode(text, add_special_tokens=True).ids
                    if 4 <= len(ids) <= 7:
                        break
                assert ids[:len(add_bos)] == add_bos
            else:
                n = s["long"] + int(rng.integers(-3, 4))
                ids = add_bos + [int(x) for x in rng.integers(0, s["vocab"], n)]
            margin = min(greedy(model, ids)[1])
            if found is None or margin > found[0]:
                found = (margin, ids, text)
            if margin > 0.25:
                break
        best.append(case(model, found[1], found[2]))
    return best


def write_golden(path, cases, extra=None):
    value = {"versions": VERSIONS}
    value.update(extra or {})
    with open(path, "w", encoding="utf-8") as f:
        head = json.dumps(value)
        f.write(head[:-1] + ',\n"cases": [\n')
        f.write(",\n".join(json.dumps(c, separators=(",", ":")) for c in cases))
        f.write("\n]}\n")


# --------------------------------------------------------------------------
# K-quants: the gguf package reads them but does not write them, so blocks are
# made directly, with random scales and quants.

def pack_scales(sc, m):
    """8 six-bit scales and 8 six-bit mins into 12 bytes, as ggml does."""
    out = np.zeros((sc.shape[0], 12), np.uint8)
    out[:, 0:4] = (sc[:, :4] & 63) | ((sc[:, 4:] >> 4) << 6)
    out[:, 4:8] = (m[:, :4] & 63) | ((m[:, 4:] >> 4) << 6)
    out[:, 8:12] = (sc[:, 4:] & 15) | ((m[:, 4:] & 15) << 4)
    return out


def f16_bytes(x):
    return np.ascontiguousarray(x, np.float16).view(np.uint8).reshape(len(x), 2)


def random_k_blocks(rng, kind, n, std):
    if kind in (Q.Q4_K, Q.Q5_K):
        top = 15 if kind == Q.Q4_K else 31
        sc = rng.integers(8, 64, (n, 8))
        m = np.clip(sc + rng.integers(-6, 7, (n, 8)), 0, 63)
        d = std / (39.0 * top * 0.308) * rng.uniform(0.7, 1.3, n)
        parts = [f16_bytes(d), f16_bytes(d * top / 2), pack_scales(sc.astype(np.uint8), m.astype(np.uint8))]
        if kind == Q.Q5_K:
            parts.append(rng.integers(0, 256, (n, 32), dtype=np.uint8))
        parts.append(rng.integers(0, 256, (n, 128), dtype=np.uint8))
    elif kind == Q.Q6_K:
        sc = rng.integers(-90, 91, (n, 16)).astype(np.int8)
        d = std / (52.0 * 18.5) * rng.uniform(0.7, 1.3, n)
        parts = [rng.integers(0, 256, (n, 192), dtype=np.uint8), sc.view(np.uint8), f16_bytes(d)]
    else:
        raise ValueError(kind)
    out = np.concatenate(parts, axis=1)
    assert out.shape[1] == gguf.GGML_QUANT_SIZES[kind][1]
    return out


# --------------------------------------------------------------------------
# GGUF files

NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}


def gguf_name(name):
    stem, ext = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        n, part = stem[len("model.layers."):].split(".", 1)
        return f"blk.{n}.{NAMES[part]}.{ext}"
    return f"{NAMES[stem]}.{ext}"


def hf_name(name):
    back = {v: k for k, v in NAMES.items()}
    stem, ext = name.rsplit(".", 1)
    if stem.startswith("blk."):
        _, n, part = stem.split(".", 2)
        return f"model.layers.{n}.{back[part]}.{ext}"
    return f"{back[stem]}.{ext}"


def permute(w, heads):
    """Rows of q and k, as llama.cpp's converter orders them for llama."""
    return w.reshape(heads, 2, w.shape[0] // heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def unpermute(w, heads):
    return w.reshape(heads, w.shape[0] // heads // 2, 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def rotated_heads(s, name):
    """How many heads' rows are permuted in this tensor; 0 when none are."""
    if s["arch"] != "llama":
        return 0
    return s["heads"] if ".q_proj." in name else s["kv"] if ".k_proj." in name else 0


def rope_factors(s):
    """rope_freqs.weight for a llama3 rope, as llama.cpp's converter computes it."""
    r, dim = s["rope"], s["hd"]
    freqs = 1.0 / (s["theta"] ** (np.arange(0, dim, 2, dtype=np.float32) / dim))
    old = r["original_max_position_embeddings"]
    low, high = old / r["low_freq_factor"], old / r["high_freq_factor"]
    out = []
    for freq in freqs.tolist():
        wavelen = 2 * math.pi / freq
        if wavelen < high:
            out.append(1.0)
        elif wavelen > low:
            out.append(r["factor"])
        else:
            smooth = (old / wavelen - r["low_freq_factor"]) / (r["high_freq_factor"] - r["low_freq_factor"])
            out.append(1.0 / ((1 - smooth) / r["factor"] + smooth))
    return np.array(out, np.float32)


def tensor_kind(s, name, ndim):
    if ndim == 1:
        return Q.F32
    if s.get("mixed") and (".v_proj." in name or ".down_proj." in name or "embed_tokens" in name):
        return Q.Q6_K
    return s["kind"]


def write_gguf(name, s):
    tok, sp = small_tokenizer(s)
    path = os.path.join(TINY_GGUF, name + ".gguf")
    rng = rng_for("gguf/" + name)
    tensors = {}
    for hf, (shape, std) in shapes(s).items():
        kind = tensor_kind(s, hf, len(shape))
        if kind in (Q.Q4_K, Q.Q5_K, Q.Q6_K):
            raw = random_k_blocks(rng, kind, shape[0] * shape[1] // 256, std).reshape(shape[0], -1)
        else:
            w = random_tensor(rng, shape, std, hf)
            if rotated_heads(s, hf):
                w = permute(w, rotated_heads(s, hf))
            raw = w if kind == Q.F32 else w.astype(np.float16) if kind == Q.F16 else quantize(w, kind)
        tensors[gguf_name(hf)] = (np.ascontiguousarray(raw), kind)
    if s["rope"] is not None:
        tensors["rope_freqs.weight"] = (rope_factors(s), Q.F32)

    split = (len(tensors) + 1) // 2 if s.get("split") else 0
    w = gguf.GGUFWriter(path, s["arch"], split_max_tensors=split)
    w.add_name("tiny " + name)
    w.add_file_type(getattr(gguf.LlamaFileType, FTYPE[s["kind"]]))
    w.add_quantization_version(gguf.GGML_QUANT_VERSION)
    if "alignment" in s:
        w.add_custom_alignment(s["alignment"])
    w.add_block_count(s["layers"])
    w.add_context_length(256)
    w.add_embedding_length(s["hidden"])
    w.add_feed_forward_length(s["inter"])
    w.add_head_count(s["heads"])
    w.add_head_count_kv(s["kv"])
    if s.get("lengths", True):
        w.add_key_length(s["hd"])
        w.add_value_length(s["hd"])
    else:
        assert s["hidden"] == s["heads"] * s["hd"]
    w.add_rope_dimension_count(s["hd"])
    w.add_rope_freq_base(s["theta"])
    w.add_layer_norm_rms_eps(s["eps"])
    w.add_vocab_size(s["vocab"])
    n = mt.add_gguf_tokenizer(w, s["tok"], tok, sp)
    assert n == s["vocab"], (n, s["vocab"])
    for k, (raw, kind) in tensors.items():
        w.add_tensor(k, raw, raw_dtype=kind)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return gguf_files(name, s)


def gguf_files(name, s):
    if s.get("split"):
        return [os.path.join(TINY_GGUF, f"{name}-{i:05}-of-00002.gguf") for i in (1, 2)]
    return [os.path.join(TINY_GGUF, name + ".gguf")]


def load_gguf(files, s):
    """A transformers model with the weights of a GGUF file."""
    state = {}
    for file in files:
        for t in gguf.GGUFReader(file).tensors:
            if t.name == "rope_freqs.weight":
                continue
            shape = tuple(int(x) for x in reversed(t.shape))
            w = np.asarray(dequantize(t.data, t.tensor_type), np.float32).reshape(shape)
            name = hf_name(t.name)
            if rotated_heads(s, name):
                w = unpermute(w, rotated_heads(s, name))
            state[name] = torch.from_numpy(np.ascontiguousarray(w))
    if s["tied"]:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    c = hf_config(dict(s, explicit_hd=True, dtype="float32"), 0, 0)
    c.pop("torch_dtype")
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**c), attn_implementation="eager", dtype=torch.float32)
    model.load_state_dict(state, strict=True)
    return model.eval()


# --------------------------------------------------------------------------
# single blocks

QUANT_TYPES = [Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0, Q.Q4_K, Q.Q5_K, Q.Q6_K]


def f16_fields(kind):
    """Where in a block the f16 scales (and mins) are."""
    if kind in (Q.Q4_1, Q.Q5_1, Q.Q4_K, Q.Q5_K):
        return [0, 2]
    return [208] if kind == Q.Q6_K else [0]


def write_quants(kind):
    rng = rng_for("quants/" + kind.name)
    size, nbytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (12, nbytes), dtype=np.uint8)
    for i in range(12):
        for at in f16_fields(kind):
            value = np.float16(rng.standard_normal() * 10.0 ** rng.integers(-4, 1))
            blocks[i, at:at + 2] = np.array([value]).view(np.uint8)
    notes = ["random"] * 8 + ["scales subnormal f16", "scales negative", "every other byte 0xff", "scales zero"]
    for at in f16_fields(kind):
        blocks[8, at:at + 2] = np.array([rng.integers(1, 1024)], np.uint16).view(np.uint8)
        blocks[9, at + 1] |= 0x80
        blocks[11, at:at + 2] = 0
    keep = [blocks[10, at:at + 2].copy() for at in f16_fields(kind)]
    blocks[10, :] = 0xff
    for at, value in zip(f16_fields(kind), keep):
        blocks[10, at:at + 2] = value
    out = dequantize(blocks, kind).astype(np.float32)
    assert out.shape == (12, size) and np.isfinite(out).all()
    with open(os.path.join(QUANTS, kind.name + ".json"), "w", encoding="utf-8") as f:
        f.write(json.dumps({"versions": VERSIONS, "type": kind.name, "ggml_type": int(kind),
                            "block_size": size, "type_size": nbytes})[:-1] + ',\n"blocks": [\n')
        f.write(",\n".join(json.dumps({"note": note, "hex": b.tobytes().hex(),
                                       "values_u32": v.view(np.uint32).tolist()}, separators=(",", ":"))
                           for note, b, v in zip(notes, blocks, out)))
        f.write("\n]}\n")


def plain_dequantize(kind, block):
    """One block, written out from ggml's C code, to check the package with."""
    f = np.float32
    b = bytes(block)

    def half(at):
        return f(np.frombuffer(b[at:at + 2], np.float16)[0])

    out = []
    if kind in (Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0):
        d = half(0)
        if kind == Q.Q8_0:
            return [d * f(x - 256 if x > 127 else x) for x in b[2:]]
        at = 4 if kind in (Q.Q4_1, Q.Q5_1) else 2
        five = kind in (Q.Q5_0, Q.Q5_1)
        qh = int.from_bytes(b[at:at + 4], "little") if five else 0
        qs = b[at + 4:] if five else b[at:]
        for i in range(32):
            q = (qs[i] & 15) if i < 16 else (qs[i - 16] >> 4)
            q |= ((qh >> i) & 1) << 4
            if kind in (Q.Q4_1, Q.Q5_1):
                out.append(d * f(q) + half(2))
            else:
                out.append(d * f(q - (16 if five else 8)))
        return out
    if kind in (Q.Q4_K, Q.Q5_K):
        s = b[4:16]
        qh = b[16:48] if kind == Q.Q5_K else bytes(32)
        qs = b[48:] if kind == Q.Q5_K else b[16:]
        for j in range(8):
            if j < 4:
                sc, m = s[j] & 63, s[j + 4] & 63
            else:
                sc = (s[j + 4] & 15) | ((s[j - 4] >> 6) << 4)
                m = (s[j + 4] >> 4) | ((s[j] >> 6) << 4)
            d, low = half(0) * f(sc), half(2) * f(m)
            for i in range(32):
                byte = qs[32 * (j // 2) + i]
                q = (byte >> 4 if j % 2 else byte & 15) + (16 if (qh[i] >> j) & 1 else 0)
                out.append(d * f(q) - low)
        return out
    d = half(208)
    for i in range(256):
        half_, l = divmod(i, 128)
        group, k = divmod(l, 32)
        ql = b[64 * half_ + k + 32 * (group % 2)]
        q = (ql >> 4 if group >= 2 else ql & 15) | (((b[128 + 32 * half_ + k] >> (2 * group)) & 3) << 4)
        sc = b[192 + i // 16]
        out.append(d * f(sc - 256 if sc > 127 else sc) * f(q - 32))
    return out


# --------------------------------------------------------------------------
# checks

def check_cases(model, cases, vocab):
    for c in cases:
        logits = logits_of(model, c["ids"])
        assert logits.shape == (len(c["ids"]), vocab)
        assert np.allclose(logits[-1].numpy(), c["logits_last"], rtol=1e-6, atol=2e-5)
        assert abs(float(logits.abs().max()) - c["max_abs_logit"]) < 1e-4
        logp = torch.log_softmax(logits.double(), -1)
        lp = [float(logp[i, t]) for i, t in enumerate(c["ids"][1:])]
        assert np.allclose(lp, c["token_logprobs"], atol=2e-5) and abs(-sum(lp) - c["nll"]) < 1e-3
        # greedy again, without the KV cache
        ids = list(c["ids"])
        for want, margin in zip(c["greedy_ids"], c["margins"]):
            top = torch.topk(logits_of(model, ids)[-1], 2)
            assert int(top.indices[0]) == want and abs(float(top.values[0] - top.values[1]) - margin) < 1e-3
            ids.append(want)


def changes(model, ids):
    """How far the last logits move when one ingredient is taken away."""
    base = logits_of(model, ids)[-1]

    def moved():
        return float((logits_of(model, ids)[-1] - base).abs().max())

    out = {}
    groups = {}
    for k, p in model.named_parameters():
        if p.dim() == 1:
            part = k.split(".")[-2] + "." + k.split(".")[-1]
            groups.setdefault(part, []).append(p)
    for part, ps in groups.items():
        old = [p.clone() for p in ps]
        for p in ps:
            p.fill_(0.0 if part.endswith("bias") else 1.0)
        out[part] = moved()
        for p, o in zip(ps, old):
            p.copy_(o)
    rope = model.model.rotary_emb
    old = rope.inv_freq.clone()
    dim = old.numel()
    config = getattr(model.config, "rope_parameters", None) or {}
    theta = config.get("rope_theta", 10000.0)
    plain = 1.0 / (theta ** (torch.arange(0, dim) / dim))
    if not torch.allclose(old, plain.to(old.dtype)):
        rope.inv_freq.copy_(plain)
        out["rope scaling"] = moved()
    rope.inv_freq.copy_(1.0 / ((theta * 1.5) ** (torch.arange(0, dim) / dim)))
    out["rope theta x1.5"] = moved()
    rope.inv_freq.copy_(old)
    assert moved() == 0.0
    att = model(input_ids=torch.tensor([ids]), output_attentions=True).attentions
    peak = min(float(a[0, :, -1].max(dim=-1).values.mean()) * len(ids) for a in att)
    return out, peak


def check_model(name, model, golden, s):
    check_cases(model, golden["cases"], s["vocab"])
    out, peak = changes(model, golden["cases"][1]["ids"])
    margin = min(min(c["margins"]) for c in golden["cases"])
    std = np.std(golden["cases"][1]["logits_last"])
    print(f"{name}: ok; logits std {std:.2f} max {golden['cases'][1]['max_abs_logit']:.2f}, smallest margin "
          f"{margin:.3f}, peak attention {peak:.1f}/n, least change {min(out, key=out.get)} {min(out.values()):.3f}",
          flush=True)
    assert min(out.values()) > 0.05 and peak > 2, out


def read_json(path):
    with open(path, encoding="utf-8") as f:
        return json.load(f)


def check():
    for name, s in HF.items():
        folder = os.path.join(TINY, name)
        golden = read_json(os.path.join(folder, "golden.json"))
        tok = Tokenizer.from_file(os.path.join(folder, "tokenizer.json"))
        assert tok.encode(golden["cases"][0]["text"]).ids == golden["cases"][0]["ids"]
        check_model(name, load_hf(folder), golden, s)
        fast = transformers.AutoTokenizer.from_pretrained(folder)
        assert fast.chat_template == mt.FAMILIES[s["tok"]]["template"]
    for name, s in GGUF.items():
        golden = read_json(os.path.join(TINY_GGUF, name + ".golden.json"))
        check_model(name, load_gguf(gguf_files(name, s), s), golden, s)
        if s["rope"] is not None:
            t = [t for t in gguf.GGUFReader(gguf_files(name, s)[0]).tensors if t.name == "rope_freqs.weight"][0]
            model = load_gguf(gguf_files(name, s), s)
            freqs = 1.0 / (s["theta"] ** (np.arange(0, s["hd"], 2) / s["hd"])) / t.data
            assert np.allclose(freqs, model.model.rotary_emb.inv_freq.numpy(), rtol=1e-5)
    for kind in QUANT_TYPES:
        data = read_json(os.path.join(QUANTS, kind.name + ".json"))
        for b in data["blocks"]:
            raw = bytes.fromhex(b["hex"])
            want = np.array(b["values_u32"], np.uint32)
            got = np.array(plain_dequantize(kind, raw), np.float32).view(np.uint32)
            # bit for bit, but for the sign of a zero
            same = (got == want) | (((got | want) & 0x7fffffff) == 0)
            assert same.all(), (kind, b["note"])
            exact = (got == want).all()
            if not exact:
                print(kind.name, b["note"], "differs in the sign of zero")
    print("quants: ok")


def main():
    if "--check" not in sys.argv:
        os.makedirs(TINY_GGUF, exist_ok=True)
        os.makedirs(QUANTS, exist_ok=True)
        for kind in QUANT_TYPES:
            write_quants(kind)
        for name, s in HF.items():
            folder = write_hf(name, s)
            tok, _ = small_tokenizer(s)
            bos, _ = eos_bos(s, tok)
            write_golden(os.path.join(folder, "golden.json"), goldens(load_hf(folder), s, name, tok, bos))
            print("wrote", name, flush=True)
        for name, s in GGUF.items():
            files = write_gguf(name, s)
            tok, _ = small_tokenizer(s)
            bos, _ = eos_bos(s, tok)
            cases = goldens(load_gguf(files, s), s, name, tok, bos)
            write_golden(os.path.join(TINY_GGUF, name + ".golden.json"), cases,
                         {"files": [os.path.basename(p) for p in files]})
            print("wrote", name, flush=True)
    check()


if __name__ == "__main__":
    main()
