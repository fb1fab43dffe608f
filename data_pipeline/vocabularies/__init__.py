"""What tokens stand for: one module per kind of tokenizer, all of them a `Vocabulary`.

Imported by data_pipeline.tokenizer and by the builder. Each module imports its library late.
"""
