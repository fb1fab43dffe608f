"""What tokens stand for: one module per kind of tokenizer, all of them a `Vocabulary`.

Imported by data_pipeline.tokenizer, builder and corpora. Each module imports its library late.
"""
