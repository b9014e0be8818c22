// The order of every long sum over K.
//
// K is cut in blocks of 32 values, the blocks of a row in SEGMENTS contiguous segments (a profile's choice; the first
// `blocks % SEGMENTS` hold one block more). A dot product is the sum, in order, of its segments' sums, and
// a segment's sum goes through its blocks in order. A kernel may give a segment to a lane or walk all of
// them in one lane: the bits are the same.
//
// Stored blocks are interleaved, block j of segment s at position j * SEGMENTS + s, so that lanes which
// walk one segment each read neighbours. INTERLEAVE rows of a matrix stand block by block beside each other, for lanes
// which walk one row each; the last rows are padded.

fn segment_length(blocks: u32, segment: u32) -> u32 {
    return blocks / SEGMENTS + select(0u, 1u, segment < blocks % SEGMENTS);
}

fn segment_first(blocks: u32, segment: u32) -> u32 {
    return segment * (blocks / SEGMENTS) + min(segment, blocks % SEGMENTS);
}

// The stored position of a block.
fn block_position(blocks: u32, block: u32) -> u32 {
    let short = blocks / SEGMENTS;
    let longer = blocks % SEGMENTS;
    let edge = longer * (short + 1u);
    if block < edge {
        return (block % (short + 1u)) * SEGMENTS + block / (short + 1u);
    }
    let rest = block - edge;
    return (rest % max(short, 1u)) * SEGMENTS + longer + rest / max(short, 1u);
}

// Where the block at `position` of `row` is stored.
fn block_index(row: u32, blocks: u32, position: u32) -> u32 {
    return (row / INTERLEAVE * blocks + position) * INTERLEAVE + row % INTERLEAVE;
}

// Where what belongs to a superblock of `row` is stored.
fn super_index(row: u32, blocks: u32, block: u32) -> u32 {
    return (row / INTERLEAVE * (blocks / 8u) + block / 8u) * INTERLEAVE + row % INTERLEAVE;
}
