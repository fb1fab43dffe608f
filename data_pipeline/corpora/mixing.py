"""How well the domains of a corpus are mixed in its shards, compared with a full shuffle.

A domain is a folder or file of the input. A lane reads a shard from its start to its end, the
documents of the shard in random order, so what counts is which documents are together in a shard.
Two figures follow from the documents and tokens of each domain in each shard:

* how often the next document of a lane is of the domain of the one before;
* how much the share of a domain in the lanes varies while each reads one shard: the standard
  deviation over shards, divided by that of as many documents drawn at random. It is the same for
  any number of lanes, and its square is the design effect of cluster sampling (Kish 1965). For
  shorter stretches it is smaller: 1 while each lane reads one document.

All are sums over shards, so those of the parts of a build add up.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, fields
from typing import Any

from data_pipeline.corpora.corpus import Corpus
from foundation.records import Fields, InvalidField

MOST_DOMAINS = 64  # more folders or files are joined to so many groups
SAMPLED_SHARDS = 32  # whose ids are read if the build has recorded no domains
_RECORD = re.compile(r":\d+(#\d+)?$")  # at the end of the id of a record without its own


@dataclass(slots=True)
class DomainOfShard:
    """What a shard holds of a domain."""

    documents: int = 0
    tokens: int = 0
    squares: int = 0  # of the tokens of each document, added up

    def add(self, tokens: int) -> None:
        """Count a document."""
        self.documents += 1
        self.tokens += tokens
        self.squares += tokens * tokens


ShardDomains = Mapping[str, DomainOfShard]


@dataclass(frozen=True, slots=True)
class DomainSums:
    """Sums over the shards of a split, of one domain."""

    documents: float = 0  # float because a JSON file may hold them, and squares are large
    tokens: float = 0
    squares: float = 0  # of the tokens of each document
    shard_squares: float = 0  # of the domain's tokens in each shard
    shard_products: float = 0  # of those and the tokens of the shard
    followers: float = 0  # expected number that are read after another of the domain and shard

    def __add__(self, other: DomainSums) -> DomainSums:
        return DomainSums(*map(sum, zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class Mixing:
    """The sums of all domains; `+` joins those of other shards."""

    shards: float = 0
    shard_squares: float = 0  # of the tokens of each shard
    domains: Mapping[str, DomainSums] = field(default_factory=dict)

    def __add__(self, other: Mixing) -> Mixing:
        names = dict.fromkeys((*self.domains, *other.domains))
        none = DomainSums()
        domains = {
            name: self.domains.get(name, none) + other.domains.get(name, none) for name in names
        }
        shard_squares = self.shard_squares + other.shard_squares
        return Mixing(self.shards + other.shards, shard_squares, domains)

    @property
    def documents(self) -> float:
        return sum(each.documents for each in self.domains.values())

    @property
    def tokens(self) -> float:
        return sum(each.tokens for each in self.domains.values())

    @property
    def same_domain(self) -> float:
        """How often the next document of a lane is of the same domain, from 0 to 1."""
        by_chance = sum((each.documents / self.documents) ** 2 for each in self.domains.values())
        followers = sum(each.followers for each in self.domains.values())
        return (followers + self.shards * by_chance) / self.documents

    @property
    def same_domain_shuffled(self) -> float:
        """The same after a full shuffle."""
        counts = [each.documents for each in self.domains.values()]
        return sum(n * (n - 1) for n in counts) / max(self.documents * (self.documents - 1), 1)

    @property
    def variations(self) -> dict[str, float]:
        """By how much the share of each domain varies, as a multiple of a full shuffle's."""
        squares = sum(each.squares for each in self.domains.values())
        found = {}
        for name, each in self.domains.items():
            share = each.tokens / self.tokens
            # Sums of (tokens of the domain - share * tokens)**2, over shards and over documents.
            by_shard = each.shard_squares - 2 * share * each.shard_products
            by_shard += share**2 * self.shard_squares
            by_document = each.squares * (1 - 2 * share) + share**2 * squares
            found[name] = math.sqrt(max(by_shard, 0) / by_document) if by_document > 0 else 0.0
        return found

    @property
    def most_varying(self) -> tuple[str, float]:
        """The domain whose share varies most, and by how much."""
        return max(self.variations.items(), key=lambda each: each[1], default=("", 0.0))

    def tree(self) -> dict[str, Any]:
        """Return what `mixing_of_tree` reads, for a JSON file."""
        return asdict(self)


def mixing_of(shards: Iterable[ShardDomains]) -> Mixing:
    """Return the sums over these shards."""
    count = shard_squares = 0
    sums: defaultdict[str, DomainSums] = defaultdict(DomainSums)
    for shard in shards:
        documents = sum(each.documents for each in shard.values())
        tokens = sum(each.tokens for each in shard.values())
        count, shard_squares = count + 1, shard_squares + tokens**2
        for name, each in shard.items():
            followers = each.documents * (each.documents - 1) / documents
            sums[name] += DomainSums(
                each.documents,
                each.tokens,
                each.squares,
                each.tokens**2,
                each.tokens * tokens,
                followers,
            )
    return Mixing(count, shard_squares, dict(sums))


def mixing_of_tree(tree: Fields) -> Mixing:
    """Return what a file records; InvalidField unless it fits together."""
    names = [each.name for each in fields(DomainSums)]
    domains = {
        name: DomainSums(*(inner.only(names).number(each) for each in names))
        for name, inner in tree.objects("domains").items()
    }
    if any(min(astuple(each)) < 0 or each.documents < 1 for each in domains.values()):
        raise InvalidField("domains have sums below 0, or no documents")
    return Mixing(tree.number("shards"), tree.number("shard_squares"), domains)


def mixing_by_ids(corpus: Corpus) -> Mixing | None:
    """Return the sums over a sample of the shards, with the domains that the documents' ids name.

    Ids do that where the input had none of its own: `web/a.txt`, `books.jsonl:17`. None for others.
    """
    count = len(corpus.manifest.shards)
    step = -(-count // SAMPLED_SHARDS)
    names: list[str] = []
    readers = [corpus.shard(number) for number in range(0, count, step)]
    for reader in readers:
        for document in range(len(reader)):
            document_id = reader.document_id(document)
            name = _RECORD.sub("", document_id)
            if name == document_id and "/" not in name:
                return None
            names.append(name)
    domains = iter(domains_of(names))
    shards = []
    for reader in readers:
        found: defaultdict[str, DomainOfShard] = defaultdict(DomainOfShard)
        for tokens in reader.lengths.tolist():
            found[next(domains)].add(tokens)
        shards.append(found)
    return mixing_of(shards)


def domains_of(names: Sequence[str]) -> list[str]:
    """Return the domain of each file: its folder below the folder of all, or else itself.

    If there are more than MOST_DOMAINS, those that are next to each other are joined.
    """
    paths = [name.split("/") for name in names]
    outer = (min(path[:-1] for path in paths), max(path[:-1] for path in paths))
    is_common = (first == last for first, last in zip(*outer, strict=False))
    depth = sum(itertools.takewhile(bool, is_common))
    found = [path[depth] for path in paths]
    distinct = list(dict.fromkeys(found))
    if len(distinct) <= MOST_DOMAINS:
        return found
    groups: defaultdict[int, list[str]] = defaultdict(list)
    for number, name in enumerate(distinct):
        groups[number * MOST_DOMAINS // len(distinct)].append(name)
    label = {
        name: members[0] if len(members) == 1 else f"{members[0]} to {members[-1]}"
        for members in groups.values()
        for name in members
    }
    return [label[name] for name in found]
