// What all lanes of a subgroup of 8 read: each reads a token's share and hands it to the others. Software drivers pay for
// every component that a lane loads, also where all load the same. A line for each lane: subgroupBroadcast wants a
// constant. Lanes are invocations in order, as the self-test and the tests of kernels would notice.

// Blocks at `position` of COLS tokens from `token0` on.
fn columns(token0: u32, position: u32, lane: u32) -> array<Column, COLUMNS> {
    let mine = column(token0 + lane % COLS, position);
    var all: array<Column, COLUMNS>;
    all[0] = Column(subgroupBroadcast(mine.lo, 0u), subgroupBroadcast(mine.hi, 0u), subgroupBroadcast(mine.xs, 0u));
    if COLS > 1u {
        all[1] = Column(subgroupBroadcast(mine.lo, 1u), subgroupBroadcast(mine.hi, 1u), subgroupBroadcast(mine.xs, 1u));
    }
    if COLS > 2u {
        all[2] = Column(subgroupBroadcast(mine.lo, 2u), subgroupBroadcast(mine.hi, 2u), subgroupBroadcast(mine.xs, 2u));
    }
    if COLS > 3u {
        all[3] = Column(subgroupBroadcast(mine.lo, 3u), subgroupBroadcast(mine.hi, 3u), subgroupBroadcast(mine.xs, 3u));
    }
    if COLS > 4u {
        all[4] = Column(subgroupBroadcast(mine.lo, 4u), subgroupBroadcast(mine.hi, 4u), subgroupBroadcast(mine.xs, 4u));
    }
    if COLS > 5u {
        all[5] = Column(subgroupBroadcast(mine.lo, 5u), subgroupBroadcast(mine.hi, 5u), subgroupBroadcast(mine.xs, 5u));
    }
    if COLS > 6u {
        all[6] = Column(subgroupBroadcast(mine.lo, 6u), subgroupBroadcast(mine.hi, 6u), subgroupBroadcast(mine.xs, 6u));
    }
    if COLS > 7u {
        all[7] = Column(subgroupBroadcast(mine.lo, 7u), subgroupBroadcast(mine.hi, 7u), subgroupBroadcast(mine.xs, 7u));
    }
    return all;
}
