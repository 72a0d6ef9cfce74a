from __future__ import annotations
def check_laws(policy, layer, tables):
    pass
