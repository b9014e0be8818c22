//! Fields of requests as the OpenAPI document describes them, where the types of Rust say less than is checked.

use serde_json::Value;
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{AdditionalProperties, Array, ArrayBuilder, ObjectBuilder, OneOfBuilder, Schema, Type};

use super::answers::{STOP_CHARACTERS_MAX, STOPS_MAX};
use super::completions::PROMPTS_MAX;
use crate::requests::choosing::BIASES_MAX;
pub use crate::requests::null_schema as null;

/// `stop`: null, a text, or several.
pub fn stop() -> Schema {
    let text =
        || ObjectBuilder::new().schema_type(Type::String).min_length(Some(1)).max_length(Some(STOP_CHARACTERS_MAX));
    OneOfBuilder::new().item(null()).item(text()).item(list(text().into(), 0, STOPS_MAX)).build().into()
}

/// `prompt`: a text, several, token ids, or several lists of those.
pub fn prompt() -> Schema {
    let text = || ObjectBuilder::new().schema_type(Type::String).min_length(Some(1));
    let id = ObjectBuilder::new().schema_type(Type::Integer).minimum(Some(0)).maximum(Some(u32::MAX as f64));
    let ids = ArrayBuilder::new().items(id).min_items(Some(1)).build();
    OneOfBuilder::new()
        .item(text())
        .item(list(text().into(), 1, PROMPTS_MAX))
        .item(ids.clone())
        .item(list(ids.into(), 1, PROMPTS_MAX))
        .build()
        .into()
}

/// `logit_bias`: numbers by token id.
pub fn logit_bias() -> Schema {
    let id = ObjectBuilder::new().schema_type(Type::String).pattern(Some("^[0-9]+$"));
    let bias = ObjectBuilder::new().schema_type(Type::Number);
    let biases = ObjectBuilder::new()
        .schema_type(Type::Object)
        .property_names(Some(id))
        .additional_properties(Some(AdditionalProperties::RefOr(RefOr::T(Schema::Object(bias.build())))))
        .max_properties(Some(BIASES_MAX));
    OneOfBuilder::new().item(null()).item(biases).build().into()
}

/// `modalities`: null, or text.
pub fn modalities() -> Schema {
    let text = ObjectBuilder::new().schema_type(Type::String).enum_values(Some(["text"]));
    OneOfBuilder::new().item(null()).item(list(text.into(), 0, 1)).build().into()
}

/// What is known and must not be true.
pub fn only_false() -> Schema {
    let no = ObjectBuilder::new().schema_type(Type::Boolean).enum_values(Some([Value::Bool(false)]));
    OneOfBuilder::new().item(null()).item(no).build().into()
}

fn list(items: RefOr<Schema>, least: usize, most: usize) -> Array {
    ArrayBuilder::new().items(items).min_items(Some(least)).max_items(Some(most)).build()
}
