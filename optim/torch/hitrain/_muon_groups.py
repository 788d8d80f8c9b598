# SPDX-License-Identifier: Apache-2.0
"""Which parameters of a model Muon trains, and which AdamW."""
import re
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple, Union

import torch
from torch import nn

from hitrain._newton_schulz import rows_of_blocks

Split = Union[int, Sequence[int]]

HEADS = ('head', 'lm_head', 'embed_out', 'out', 'output', 'classifier', 'score', 'unembed')
_NO_MATRICES = (nn.Embedding, nn.EmbeddingBag, nn.modules.conv._ConvNd)


def muon_groups(model: nn.Module, *, others: Optional[Mapping[str, Any]] = None, not_muon: Iterable[str] = (),
                split: Optional[Mapping[str, Split]] = None) -> List[Dict[str, Any]]:
    """The parameters of a model in groups for hitrain.Muon: hidden matrices by Muon, and all else by AdamW.

    Muon trains parameters [m, n], and [E, m, n] as experts have them, of more than one row and column. AdamW trains all others, and these matrices:
    of embeddings and convolutions; those called embed or position; of output heads, which are the result of get_output_embeddings(), a Linear
    with a row for each row of an embedding, if no Linear takes as many inputs, and modules that the model itself calls head, lm_head, out or the like; weights that are tied to one of these.

    others    hyper-parameters of AdamW, as lr, betas and weight_decay; default: those of hitrain.AdamW
    not_muon  names of further matrices that AdamW trains
    split     rows of blocks that are matrices of their own, by name: {'qkv': (4096, 1024, 1024)}, or one number for equal blocks, as
              {'q_proj': 128} for heads of 128 rows. Of [E, m, n] it cuts each m

    A name is one of a parameter or module, with or without those around it: 'qkv', '0.attn' and 'qkv.weight' all name 'blocks.0.attn.qkv.weight'.
    ValueError: a name names nothing, or that of a split nothing that Muon trains."""
    named: List[Tuple[str, torch.Tensor]] = list(model.named_parameters())
    out = {id(p) for m in model.modules() if isinstance(m, _NO_MATRICES) for p in m.parameters(recurse=False)}
    out |= {id(p) for m in _heads(model) for p in m.parameters()}
    out |= {id(p) for word in not_muon for _, p in _called(named, word, 'not_muon')}
    muon = {id(p) for name, p in named if id(p) not in out and _is_matrix(name, p)}
    split_of: Dict[int, Split] = {}
    for word, blocks in (split or {}).items():
        called = _called(named, word, 'split')
        own = [(name, p) for name, p in called if id(p) in muon]
        if not own:
            raise ValueError(f'split names {called[0][0]}, which Muon does not train')
        for name, p in own:
            if id(p) in split_of:
                raise ValueError(f'split names {name} twice, the second time by {word}')
            rows_of_blocks(name, p.shape, blocks)
            split_of[id(p)] = blocks
    return _as_groups(named, muon, split_of, dict(others or {}))


def _as_groups(named: List[Tuple[str, torch.Tensor]], muon: 'set[int]', split_of: Dict[int, Split], others: Dict[str, Any]) -> List[Dict[str, Any]]:
    """One without split, one for each split, and one for all others."""
    def key_of(p: torch.Tensor) -> Any:
        blocks = split_of.get(id(p))
        return blocks if blocks is None or isinstance(blocks, int) else tuple(blocks)
    groups: Dict[Any, List[Tuple[str, torch.Tensor]]] = {None: []}
    for name, p in named:
        if id(p) in muon:
            groups.setdefault(key_of(p), []).append((name, p))
    made: List[Dict[str, Any]] = [{'params': pairs, 'use_muon': True, 'split': blocks} for blocks, pairs in groups.items() if pairs]
    rest = [(name, p) for name, p in named if id(p) not in muon]
    return made + ([{'params': rest, 'use_muon': False, **others}] if rest else [])


def _is_matrix(name: str, p: torch.Tensor) -> bool:
    if re.search(r'embed|position', name) or p.dim() not in (2, 3):
        return False
    return min(p.shape) > 1


def _heads(model: nn.Module) -> List[nn.Module]:
    rows = {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)}
    rows -= {m.in_features for m in model.modules() if isinstance(m, nn.Linear)}  # a width of the model, as that of a table of positions may be
    heads: List[nn.Module] = [m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features in rows]
    heads += [m for name, m in model.named_children() if name in HEADS]
    given = getattr(model, 'get_output_embeddings', lambda: None)()
    return heads + ([given] if isinstance(given, nn.Module) else [])


def _called(named: List[Tuple[str, torch.Tensor]], word: str, what: str) -> List[Tuple[str, torch.Tensor]]:
    found = [(name, p) for name, p in named if f'.{word}.' in f'.{name}.']
    if not found:
        raise ValueError(f'{what} names {word}, and no parameter of the model has that in its name')
    return found
