//! Writes GGUF version 3 files: what tests and tools use to make small models.

use super::DType;
use super::gguf::{MAGIC, type_id};

/// Alignment of tensor data that [`GgufWriter`] uses, in bytes; the format's default.
const ALIGNMENT: usize = 32;

/// Collects metadata and tensors, then lays them out as one file.
///
/// It writes what it is told and checks nothing, so that tests can make broken files too.
#[derive(Clone, Debug, Default)]
pub struct GgufWriter {
    metadata: Vec<u8>,
    keys: u64,
    directory: Vec<u8>,
    tensors: u64,
    data: Vec<u8>,
}

impl GgufWriter {
    /// An empty file.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a string.
    pub fn set_str(&mut self, key: &str, value: &str) -> &mut Self {
        let mut bytes = Vec::new();
        put_str(&mut bytes, value);
        self.set_raw(key, 8, &bytes)
    }

    /// Adds an unsigned 32-bit integer.
    pub fn set_u32(&mut self, key: &str, value: u32) -> &mut Self {
        self.set_raw(key, 4, &value.to_le_bytes())
    }

    /// Adds an unsigned 64-bit integer.
    pub fn set_u64(&mut self, key: &str, value: u64) -> &mut Self {
        self.set_raw(key, 10, &value.to_le_bytes())
    }

    /// Adds a 32-bit float.
    pub fn set_f32(&mut self, key: &str, value: f32) -> &mut Self {
        self.set_raw(key, 6, &value.to_le_bytes())
    }

    /// Adds a boolean.
    pub fn set_bool(&mut self, key: &str, value: bool) -> &mut Self {
        self.set_raw(key, 7, &[u8::from(value)])
    }

    /// Adds an array of strings.
    pub fn set_strs(&mut self, key: &str, values: &[impl AsRef<str>]) -> &mut Self {
        let mut bytes = array_header(8, values.len());
        values.iter().for_each(|value| put_str(&mut bytes, value.as_ref()));
        self.set_raw(key, 9, &bytes)
    }

    /// Adds an array of signed 32-bit integers.
    pub fn set_i32s(&mut self, key: &str, values: &[i32]) -> &mut Self {
        let mut bytes = array_header(5, values.len());
        values.iter().for_each(|value| bytes.extend(value.to_le_bytes()));
        self.set_raw(key, 9, &bytes)
    }

    /// Adds an array of 32-bit floats.
    pub fn set_f32s(&mut self, key: &str, values: &[f32]) -> &mut Self {
        let mut bytes = array_header(6, values.len());
        values.iter().for_each(|value| bytes.extend(value.to_le_bytes()));
        self.set_raw(key, 9, &bytes)
    }

    /// Adds a value by its type code and its bytes.
    pub fn set_raw(&mut self, key: &str, kind: u32, bytes: &[u8]) -> &mut Self {
        put_str(&mut self.metadata, key);
        self.metadata.extend(kind.to_le_bytes());
        self.metadata.extend(bytes);
        self.keys += 1;
        self
    }

    /// Adds a tensor; `shape` is outermost first, `bytes` its rows as they are to lie on disk.
    pub fn add_tensor(&mut self, name: &str, dtype: DType, shape: &[usize], bytes: &[u8]) -> &mut Self {
        self.add_raw_tensor(name, type_id(dtype), shape, bytes)
    }

    /// Adds a tensor of any ggml type, by its id.
    pub fn add_raw_tensor(&mut self, name: &str, ggml_type: u32, shape: &[usize], bytes: &[u8]) -> &mut Self {
        self.data.resize(self.data.len().next_multiple_of(ALIGNMENT), 0);
        put_str(&mut self.directory, name);
        self.directory.extend((shape.len() as u32).to_le_bytes());
        shape.iter().rev().for_each(|extent| self.directory.extend((*extent as u64).to_le_bytes()));
        self.directory.extend(ggml_type.to_le_bytes());
        self.directory.extend((self.data.len() as u64).to_le_bytes());
        self.data.extend(bytes);
        self.tensors += 1;
        self
    }

    /// The whole file.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::from(MAGIC);
        out.extend(3_u32.to_le_bytes());
        out.extend(self.tensors.to_le_bytes());
        out.extend(self.keys.to_le_bytes());
        out.extend(&self.metadata);
        out.extend(&self.directory);
        if self.tensors > 0 {
            out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
        }
        out.extend(&self.data);
        out
    }
}

fn array_header(kind: u32, count: usize) -> Vec<u8> {
    let mut bytes = Vec::from(kind.to_le_bytes());
    bytes.extend((count as u64).to_le_bytes());
    bytes
}

fn put_str(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}
