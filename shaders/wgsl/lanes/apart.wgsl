// What all lanes of a subgroup read: each reads it.

// Blocks at `position` of COLS tokens from `token0` on.
fn columns(token0: u32, position: u32, lane: u32) -> array<Column, COLUMNS> {
    var all: array<Column, COLUMNS>;
    for (var c = 0u; c < COLS; c++) {
        all[c] = column(token0 + c, position);
    }
    return all;
}
