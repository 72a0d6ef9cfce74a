"""Policies inside a running transformers model (`pip install 'kvsim[capture]'`).

    with kvsim.live(model, "h2o(hold=share(0.5))"):
        model.generate(...)

Everything here is loaded when it is first asked for, torch with it.
"""
