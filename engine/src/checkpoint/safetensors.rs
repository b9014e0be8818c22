//! The safetensors container: one JSON header, then the tensors' bytes.
//!
//! Follows the specification of huggingface/safetensors. The header is read here and not by the `safetensors` crate
//! because that one refuses a whole file for one tensor of a type it does not know, and takes the last of two equal
//! names in silence.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};

use super::{CheckpointError, DType, Entry};

/// Longest header accepted, in bytes; the bound of the specification.
pub const HEADER_BYTES_MAX: u64 = 100_000_000;

/// Types of the specification that cannot be loaded here, and their bits per element.
const OTHER_TYPES: &[(&str, usize)] = &[
    ("BOOL", 8),
    ("U8", 8),
    ("I8", 8),
    ("F8_E5M2", 8),
    ("F8_E4M3", 8),
    ("F8_E8M0", 8),
    ("F6_E2M3", 6),
    ("F6_E3M2", 6),
    ("F4", 4),
    ("I16", 16),
    ("U16", 16),
    ("I32", 32),
    ("U32", 32),
    ("I64", 64),
    ("U64", 64),
    ("F64", 64),
    ("C64", 64),
];

fn loadable(name: &str) -> Option<DType> {
    match name {
        "F32" => Some(DType::F32),
        "F16" => Some(DType::F16),
        "BF16" => Some(DType::BF16),
        _ => None,
    }
}

/// Reads the directory in `bytes`, which is a whole file; `file` appears in messages.
///
/// # Errors
/// [`CheckpointError`] when the header is truncated, no JSON, or contradicts itself.
pub(super) fn parse(bytes: &[u8], file: &Path) -> Result<Vec<Entry>, CheckpointError> {
    let truncated = |at: u64, reading: &str| CheckpointError::Truncated {
        file: file.into(),
        at,
        reading: reading.into(),
        len: bytes.len() as u64,
    };
    let malformed = |at: u64, what: String| CheckpointError::Malformed {
        file: file.into(),
        at,
        reading: "the safetensors header".into(),
        what,
    };
    let Some((len, rest)) = bytes.split_first_chunk() else {
        return Err(truncated(0, "the length of the safetensors header"));
    };
    let len = u64::from_le_bytes(*len);
    if len > HEADER_BYTES_MAX {
        return Err(malformed(0, format!("it claims {len} bytes; at most {HEADER_BYTES_MAX} are accepted")));
    }
    let Some(header) = rest.get(..len as usize) else {
        return Err(truncated(8, "the safetensors header"));
    };
    let header: Header = serde_json::from_slice(header)
        .map_err(|e| malformed(8, format!("line {} column {} of its JSON: {e}", e.line(), e.column())))?;
    let data = 8 + len as usize;
    header.0.into_iter().map(|(name, tensor)| tensor.entry(name, data, file)).collect()
}

/// The header's tensors; a name that is there twice is refused while reading.
struct Header(BTreeMap<String, Tensor>);

#[derive(Deserialize)]
struct Tensor {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Names;
        impl<'de> Visitor<'de> for Names {
            type Value = Header;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
                let mut tensors = BTreeMap::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<IgnoredAny>()?;
                    } else if tensors.insert(name.clone(), map.next_value()?).is_some() {
                        let twice = format_args!("tensor `{name}` is there twice");
                        return Err(A::Error::custom(twice));
                    }
                }
                Ok(Header(tensors))
            }
        }
        deserializer.deserialize_map(Names)
    }
}

impl Tensor {
    fn entry(self, name: String, data: usize, file: &Path) -> Result<Entry, CheckpointError> {
        let error = |what: String| CheckpointError::Tensor { file: file.into(), tensor: name.clone(), what };
        let [start, end] = self.data_offsets;
        let range = usize::try_from(start).ok().zip(usize::try_from(end).ok()).filter(|(start, end)| start <= end);
        let range = range.and_then(|(start, end)| data.checked_add(start).map(|offset| (offset, end - start)));
        let (offset, bytes) = range.ok_or_else(|| error(format!("its data_offsets are {start} and {end}")))?;
        let shape = self.shape.iter().map(|extent| usize::try_from(*extent)).collect::<Result<Vec<_>, _>>();
        let shape = shape.map_err(|_| error(format!("its shape {:?} overflows", self.shape)))?;
        let dtype = loadable(&self.dtype);
        let bits = match dtype {
            Some(dtype) => Some(dtype.block_bytes() * 8),
            None => OTHER_TYPES.iter().find(|(name, _)| *name == self.dtype).map(|(_, bits)| *bits),
        };
        let elements = shape.iter().try_fold(1_usize, |product, extent| product.checked_mul(*extent));
        let elements = elements.ok_or_else(|| error(format!("its shape {shape:?} overflows")))?;
        if let Some(bits) = bits
            && elements.checked_mul(bits).map(|bits| bits.div_ceil(8)) != Some(bytes)
        {
            let dtype = &self.dtype;
            return Err(error(format!("it has {bytes} bytes, which is not what {dtype} of shape {shape:?} takes")));
        }
        Ok(Entry { source_name: name, dtype: dtype.ok_or(self.dtype), shape, offset, bytes: Some(bytes) })
    }
}
