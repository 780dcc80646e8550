"""Train the demo's P-EAGLE head anew: `python -m autotune.demo.training --help`.

P-EAGLE (arXiv 2602.01469) is EAGLE-3 with parallel drafting: one pass of a small drafter proposes
all K tokens. The first slot reads what EAGLE-3 reads, the next token's embedding and the target's
hidden state. The other K - 1 slots cannot know the tokens before them, so they read the embedding
of a mask token and one learned hidden state, `mask_hidden`, and differ by position alone.

The way through the modules: `answers` lets the target answer prompts, `samples` reads those
answers, `target` gives the hidden states, `batches` lays out slots and their attention, `drafter`
is the network, `start` fills it, `fitting` takes the steps and `save` writes what vLLM loads;
`train` is the whole run.

Importing this package loads no torch; its modules do.
"""
