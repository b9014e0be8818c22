//! What kernels read of a step.

use pp_shaders::profile::TOP_K;
use pp_shaders::{Edit, PAGE, SPLIT};

use super::{Stage, StepError};
use crate::message::Step;
use crate::program::Shape;
use crate::program::ops::{Alone, Bucket};

/// A step as its kernels read it.
#[derive(Default)]
pub struct Inputs {
    pub tokens: Vec<[u32; 4]>,
    pub rotation: Vec<[f32; 2]>,
    pub pages: Vec<u32>,
    pub tiles: Vec<[u32; 4]>,
    pub outputs: Vec<[u32; 4]>,
    pub edits: Vec<Edit>,
    pub shape: Shape,
}

/// Which program computes the layers of a step.
pub fn body_bucket(shape: &Shape) -> Bucket {
    let alone = match shape.alone {
        0 => Alone::None,
        alone if alone == shape.tokens => Alone::All,
        _ => Alone::First,
    };
    Bucket::of(shape.tokens as usize, shape.splits, alone)
}

impl Stage {
    pub(super) fn inputs(&self, step: &Step) -> Result<Inputs, StepError> {
        let tile = self.backend.profile().prefill_tile;
        let mut inputs = Inputs::default();
        let mut longest = 0;
        // Who decodes comes first in a step.
        let alone = step.spans.iter().take(self.layout.alone_max()).take_while(|span| span.count == 1).count();
        for (place, span) in step.spans.iter().enumerate() {
            let table = self.tables.get(&span.sequence).map_or(&[][..], Vec::as_slice);
            let end = span.start as usize + span.count as usize;
            if table.len() * PAGE < end {
                return Err(StepError::NoPage { sequence: span.sequence, position: end as u32 - 1 });
            }
            let first_token = inputs.tokens.len() as u32;
            let first_page = inputs.pages.len() as u32;
            for i in 0..span.count {
                let id = step.ids.get(inputs.tokens.len()).copied().unwrap_or(0);
                inputs.tokens.push([id, span.start + i, first_page, 0]);
                self.rotate(span.start + i, &mut inputs.rotation);
            }
            inputs.pages.extend(&table[..end.div_ceil(PAGE)]);
            for first in (0..span.count).step_by(tile as usize).filter(|_| place >= alone) {
                inputs.tiles.push([first_token + first, tile.min(span.count - first), 0, 0]);
            }
            longest = longest.max(end);
        }
        inputs.outputs = step
            .outputs
            .iter()
            .map(|o| [o.row, o.target, o.inverse_temperature.to_bits(), o.top_k.clamp(1, TOP_K)])
            .collect();
        if self.layout.head.is_some() {
            inputs.edits = self.edits(step);
        }
        inputs.shape = Shape {
            tokens: inputs.tokens.len() as u32,
            outputs: inputs.outputs.len() as u32,
            edits: inputs.edits.len() as u32,
            alone: alone as u32,
            tiles: inputs.tiles.len() as u32,
            splits: longest.div_ceil(SPLIT) as u32,
        };
        Ok(inputs)
    }

    /// The edits of all outputs, filled up to a power of two: so steps that follow each other mostly have equal shapes.
    fn edits(&self, step: &Step) -> Vec<Edit> {
        let rows = step.outputs.iter().zip((0..).step_by(self.layout.dims.vocab));
        let mut edits: Vec<Edit> =
            rows.flat_map(|(output, first)| output.edits.iter().map(move |edit| edit.at(first + edit.id))).collect();
        if !edits.is_empty() {
            let filled = edits.len().next_power_of_two().max(64).min(self.layout.edits_max);
            edits.resize(filled.max(edits.len()), Edit::NONE);
        }
        edits
    }

    /// (cos, sin) of every rotated pair at a position. On the host, since devices promise little of sin and cos at
    /// large angles; the angle is a product of floats, as in Hugging Face transformers.
    fn rotate(&self, position: u32, rotation: &mut Vec<[f32; 2]>) {
        rotation.extend(self.inv_freq.iter().map(|frequency| {
            let angle = f64::from(position as f32 * frequency);
            [angle.cos() as f32, angle.sin() as f32]
        }));
    }
}
