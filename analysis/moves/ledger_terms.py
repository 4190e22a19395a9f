"""What `hoptrace explain` says of the ledger's figures."""

from __future__ import annotations

from hoptrace.analysis.term import Term, sql_of

__all__ = ["TERMS"]

TERMS: tuple[Term, ...] = (
    Term(
        "moves",
        "ledger",
        "moves",
        "bytes, transfers, hops",
        "sums of `moves` by object, way, mechanism and basis",
        "What went from one place to another. Hops and control operations are those of a transfer's access path, times the "
        "transfers. Counted, derived and assumed figures are never added up. Memory → compute comes from `steps`: weight_bytes, "
        "kv_read_bytes, kv_write_bytes.",
        sql_of("ledger_moves"),
    ),
    Term(
        "link_bytes",
        "ledger",
        "bytes by link",
        "bytes",
        "Σ bytes of the moves whose path names the link; each link of a path is charged the bytes",
        "A move over three links carries its bytes three times.",
        sql_of("ledger_links"),
    ),
    Term(
        "assumed_operations",
        "ledger",
        "assumed control operations",
        "operations",
        "Σ transfers of moves that do not say theirs × control operations of the mechanism's access path (× links for messages)",
        "From the table of access paths (hoptrace.access): which of queue entry, doorbell, descriptor fetch, completion, poll a "
        "transfer of that mechanism needs at least. A message over TCP: 6 on each connection (4 within one host). Never added to "
        "counted ones.",
    ),
    Term(
        "amplification",
        "ledger",
        "amplification",
        "×",
        "bytes moved for an object over all links ÷ its size, counted once",
        "How often an object was carried: 1 would be each byte once over one link. Given where the size is known: weights "
        "(manifest), KV (as written), activations (hidden size × type, once a token computed), logits (vocabulary × 4 bytes, "
        "once an output token), tokens (4 bytes an id, assumed), prompts (1 byte a character, assumed). What was counted, "
        "derived and assumed to move has a factor each.",
    ),
    Term(
        "link_utilisation",
        "ledger",
        "link utilisation",
        "share of capacity",
        "bytes in one direction ÷ (bytes_per_s of the link × time); peak: the fullest of at most 240 bins; busy: bins over 80 %",
        "By the link's counters where it has some, else by the recorded moves, each spread evenly over its time, over the time "
        "in which moves were recorded.",
    ),
    Term(
        "unexplained_bytes",
        "ledger",
        "unexplained link bytes",
        "bytes",
        "bytes counted on the link - bytes that moves say crossed it - what packets add, where the counter holds that",
        "Over the spans between counter samples in which all who record moves did so; null where nobody recorded moves. Of "
        "several counters of a link a count goes before a rate, one that moves before one that stands still, payload before "
        "payload with protocol; where both were counted over the same time the protocol is their difference (counted), else "
        "assumed by the kind of the link. A counter that can have passed its whole range between two samples (time × 1.2 × the "
        "link's rate > 2^width) tells nothing there. At most so much where some moves do not "
        "say their bytes or were lost. Negative: the moves tell more than the wire "
        "carried, so the data took another way, or stayed in a cache before a memory. Null where the counter is absent, falls "
        "without a restart, or is a gauge.",
    ),
    Term(
        "reuse",
        "ledger",
        "reuse",
        "share of prompt tokens",
        "Σ cached_tokens ÷ Σ prompt_tokens, over stays that know both and do not only decode",
        "Prompt tokens that a cache gave, by tier where the engine tells it. Own tokens found again after a preemption "
        "(resumed_tokens) are no reuse and are counted apart, and so is KV that a decode server was handed over "
        "(handed_over_tokens). Over the whole recording; an engine's own rate is often over its last 1,000 requests.",
        sql_of("ledger_reuse"),
    ),
    Term(
        "upkeep",
        "ledger",
        "bytes moved to keep one byte cached",
        "bytes/byte",
        "bytes of KV moved between tiers ÷ (cached tokens × KV bytes of a token)",
        "What a cache costs in movement for what its hits give. Moves with a tier (host, disk, pool, peer, an offloading "
        "connector) at one end, counted ones if there are any; without such moves, blocks copied to another medium or stored "
        "outside the device. At least so much, where further moves do not say their bytes or have another basis.",
        sql_of("ledger_tier_moves"),
    ),
    Term(
        "reusable",
        "ledger",
        "what could be reused",
        "share of blocks",
        "Σ leading blocks of a prompt that an earlier request had ÷ Σ blocks",
        "One cache that all servers share: looked up before a request's own blocks are put in, hits end at the first miss. "
        "Without a limit, and as a curve over capacity with the least recently used dropped. Only equal hash spaces are joined. "
        "Assumed: no server had it.",
        sql_of("ledger_reusable"),
    ),
    Term(
        "kv_bytes_per_token",
        "ledger",
        "KV bytes of a token",
        "bytes/token",
        "2 × layers × ⌈KV heads ÷ TP⌉ × TP × head size × bytes of the type; latent attention: layers × latent size × TP × bytes",
        "From the model's config.json or the engine. With more tensor-parallel ranks than KV heads each head is held, and moved, "
        "more than once. Of hybrid models the attention layers count; layers with a sliding window keep no more than it.",
    ),
    Term(
        "resident",
        "ledger",
        "resident blocks (law 2)",
        "blocks",
        "before + stored + copied in - freed (evicted, or dropped when the cache was cleared)",
        "Nothing is lost from the ledger. Held against the steps: KV in use is within the cached blocks and one unfinished block "
        "for each running request; tokens computed are those of the stored blocks and less than a block for each stay.",
        sql_of("ledger_resident"),
    ),
)
