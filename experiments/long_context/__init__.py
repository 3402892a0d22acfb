"""A small model for 128K tokens: a LoRA adapter on SmolLM2-135M with a raised RoPE base, trained on one GPU.

The tasks are of RULER's families, but no sentence, key or value of RULER's is ever trained on (``vocabulary.py`` says
how they are kept apart), and a large part of what is learnt from is ordinary prose, so that the language stays.
"""
