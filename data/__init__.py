"""Corpora, tokenizers and batches.

    corpus = load_corpus(cfg.data, cfg.tokenizer, context=cfg.model.context)
    batches = Batches(corpus.train.tokens, context=..., batch_size=..., seed=...)
    first_tokens = batches.starts(step)

`documents` reads text, `split` holds some of it out, `tokenizer` and `tokens` turn it into ids, `cache` keeps them, `corpora`
is all of that in order; `batches` chooses windows of the ids, and `windows` reads them.
"""

from data.batches import Batches, validation_starts
from data.corpora import Corpus, Split, identity, load_corpus
from data.tokenizer import Tokenizer

__all__ = ["Batches", "Corpus", "Split", "Tokenizer", "identity", "load_corpus", "validation_starts"]
