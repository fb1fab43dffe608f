"""The Transformer-XL family in plain torch, with its recurrent memory.

Names of tensors end in the letters of their shape (`scores_BNLC`), here and in `pretrain.kernels`:

    B  lanes, or rows of a batch          N  attention heads
    L  tokens of the segment (queries)    G  heads of keys and values, each read by N / G heads
    M  rows of memory                     H  head width
    C  keys, M + L                        D  d_model
    K  compressed rows of memory          F  inner width of the feed-forward layer
    T  tokens of all lanes, B times L     E  width of a bin of the vocabulary
    V  vocabulary, or a bin's tokens      X, Y  any other size, explained where it is used

The tiles in `pretrain.kernels` add P, pairs of a head and a lane; R, the rows (queries) of a tile;
S, the keys that a tile reads; and n, the heads of a tile. Sizes without a letter stand as digits:
[B, L, 2, G, H] is `BL2GH`.
"""
