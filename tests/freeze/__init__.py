"""A record of the product's results, to show that a change of the code changes none of them.

    python -m tests.freeze check                        compare with expected.json; exits with 1 if anything differs
    python -m tests.freeze check data 'training/zero*'  some groups or cases
    python -m tests.freeze check --root DIRECTORY       another checkout
    python -m tests.freeze record order/blend           record some cases again

The cases, in `cases.toml`, run command lines of `pretrain_ladder.py` and `tools/`, and use nothing else of the product.
"""
