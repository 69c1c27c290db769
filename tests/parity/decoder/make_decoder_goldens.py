"""Makes the goldens of quantised decoders: the reference in float, and llama.cpp's distance from it.

For each model, over the tokens of text.txt (next to this file):

- the reference is transformers in float32 on the dequantised weights of the same GGUF file: for every position the ids
  and log probabilities of the TOP most likely next tokens;
- llama.cpp's mean Kullback-Leibler divergence from that reference and its top-1 agreement. The divergence is taken over
  the TOP tokens and one bucket for the rest, for every engine alike (test_parity_gguf.py does the same);
- greedy continuations of a few prompts, and the reference's gap between its best two tokens at each step. The reference
  never samples an end-of-generation token, as mpool with ``ignore_eos``.

Run by hand. The two halves need different interpreters, because llama-cpp-python compiles for minutes:

    python make_decoder_goldens.py reference MODEL.gguf out.npz     # torch, transformers, gguf
    python make_decoder_goldens.py llama MODEL.gguf out.npz         # llama-cpp-python; completes the same file

``texts-reference`` and ``texts-llama`` make a second file in the same way, such as smollm2_texts.npz: for each text of
texts/ and for text.txt its tokens, the reference with TEXTS_TOP tokens, and llama.cpp's divergence at each position.
"""

import sys
from pathlib import Path

import numpy as np

TOP = 48
TEXTS_TOP = 16
GREEDY = 64
ENDS = ("<|endoftext|>", "<|im_end|>")
PROMPTS = ("The capital of France is Paris. The largest city of Germany is",
           "def fibonacci(n):\n    ",
           "Once upon a time there was a small robot who",
           "Water boils at 100 degrees Celsius. At high altitude")


def coarse_kl(ids: np.ndarray, reference: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """Return KL(reference || softmax(logits)) per position, over the reference's most likely tokens and one bucket for
    the rest.

    Shapes: ids (n, TOP) integers, reference (n, TOP) log probabilities, logits (n, vocab).
    """
    logits = logits.astype(np.float64)
    top = logits.max(axis=1, keepdims=True)
    log_total = top + np.log(np.exp(logits - top).sum(axis=1, keepdims=True))
    mine = np.take_along_axis(logits, ids.astype(np.int64), axis=1) - log_total
    p, q = np.exp(reference.astype(np.float64)), np.exp(mine)
    rest_p = np.clip(1 - p.sum(axis=1), 1e-12, None)
    rest_q = np.clip(1 - q.sum(axis=1), 1e-12, None)
    return (p * (np.log(p) - np.log(q))).sum(axis=1) + rest_p * (np.log(rest_p) - np.log(rest_q))


def reference(model: Path, out: Path) -> None:
    """Write the reference half."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model.parent, gguf_file=model.name)
    net = AutoModelForCausalLM.from_pretrained(model.parent, gguf_file=model.name, dtype=torch.float32).eval()
    ends = [token for text, token in tokenizer.get_vocab().items() if text in ENDS]
    text = (Path(__file__).parent / "text.txt").read_text(encoding="utf-8")
    tokens = np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
    with torch.no_grad():
        logprobs = torch.log_softmax(net(torch.tensor(tokens[None].astype(np.int64))).logits[0].double(), -1)
        top = logprobs.topk(TOP, dim=-1)
        prompts, gaps, answers = [], [], []
        for prompt in PROMPTS:
            ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
            prompts.append(np.array(ids, np.int32))
            answer = net.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=GREEDY, min_new_tokens=GREEDY,
                                  repetition_penalty=1.0, suppress_tokens=ends)[0, len(ids):]
            logits = net(torch.cat([torch.tensor(ids), answer])[None]).logits[0, len(ids) - 1:-1]
            logits[:, ends] = -torch.inf
            best = logits.topk(2, dim=-1).values
            answers.append(answer.numpy().astype(np.int32))
            gaps.append((best[:, 0] - best[:, 1]).numpy().astype(np.float32))
    np.savez_compressed(out, tokens=tokens, top_ids=top.indices.numpy().astype(np.int32),
                        top_logprobs=top.values.numpy().astype(np.float32), answers=np.array(answers),
                        gaps=np.array(gaps), **{f"prompt{i}": ids for i, ids in enumerate(prompts)})


def llama(model: Path, out: Path) -> None:
    """Add llama.cpp's figures to the file."""
    import llama_cpp

    golden = dict(np.load(out))
    engine = llama_cpp.Llama(str(model), n_ctx=2048, n_batch=512, n_threads=2, verbose=False, logits_all=True,
                             flash_attn=True)
    engine.eval(golden["tokens"].tolist())
    logits = np.array(engine.scores[: len(golden["tokens"])])
    kl = coarse_kl(golden["top_ids"], golden["top_logprobs"], logits)
    golden["llama_kl"] = np.float64(kl.mean())
    golden["llama_top1"] = np.float64((logits.argmax(axis=1) == golden["top_ids"][:, 0]).mean())
    answers = []
    for i in range(len(PROMPTS)):
        engine.reset()
        answer = []
        for token in engine.generate(golden[f"prompt{i}"].tolist(), temp=0.0, repeat_penalty=1.0):
            answer.append(token)
            if len(answer) == GREEDY:
                break
        answers.append(answer)
    golden["llama_answers"] = np.array(answers, np.int32)
    golden["llama_version"] = np.array(llama_cpp.__version__)
    np.savez_compressed(out, **golden)
    print(f"{model.name}: {len(golden['tokens'])} tokens, KL {kl.mean():.6f}, top-1 {golden['llama_top1']:.4f}")


def texts_reference(model: Path, out: Path) -> None:
    """Write the reference half of the texts."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model.parent, gguf_file=model.name)
    net = AutoModelForCausalLM.from_pretrained(model.parent, gguf_file=model.name, dtype=torch.float32).eval()
    here, golden = Path(__file__).parent, {}
    for path in sorted([*(here / "texts").glob("*.txt"), here / "text.txt"]):
        tokens = tokenizer(path.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            top = torch.log_softmax(net(torch.tensor([tokens])).logits[0].double(), -1).topk(TEXTS_TOP, dim=-1)
        golden |= {f"{path.stem}.tokens": np.array(tokens, np.int32),
                   f"{path.stem}.ids": top.indices.numpy().astype(np.uint32),
                   f"{path.stem}.logprobs": top.values.numpy().astype(np.float32)}
    np.savez_compressed(out, **golden)


def texts_llama(model: Path, out: Path) -> None:
    """Add llama.cpp's divergences from the reference of the texts."""
    import llama_cpp

    golden = dict(np.load(out))
    engine = llama_cpp.Llama(str(model), n_ctx=2048, n_batch=512, n_threads=2, verbose=False, logits_all=True,
                             flash_attn=True)
    for name in [key.removesuffix(".tokens") for key in golden if key.endswith(".tokens")]:
        tokens = golden[f"{name}.tokens"]
        engine.reset()
        engine.eval(tokens.tolist())
        kl = coarse_kl(golden[f"{name}.ids"], golden[f"{name}.logprobs"], np.array(engine.scores[: len(tokens)]))
        golden[f"{name}.llama"] = kl.astype(np.float32)
        print(f"{name}: {len(tokens)} tokens, KL {kl.mean():.6f}")
    golden["llama_version"] = np.array(llama_cpp.__version__)
    np.savez_compressed(out, **golden)


if __name__ == "__main__":
    commands = {"reference": reference, "llama": llama, "texts-reference": texts_reference, "texts-llama": texts_llama}
    commands[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
