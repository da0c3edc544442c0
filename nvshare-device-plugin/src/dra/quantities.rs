//! Quantities of Kubernetes (`1536Mi`, `25`, `2e3`): whole numbers, as the capacities of a GPU are.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

/// Suffixes of powers of two, the largest last.
const BINARY: [&str; 6] = ["Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
/// Suffixes of powers of ten, and the powers.
const DECIMAL: [(&str, i32); 9] =
    [("n", -9), ("u", -6), ("m", -3), ("k", 3), ("M", 6), ("G", 9), ("T", 12), ("P", 15), ("E", 18)];

/// A size in bytes, in the form in which the API server writes it.
#[must_use]
pub fn bytes(bytes: u64) -> Quantity {
    let steps = if bytes == 0 { 0 } else { (bytes.trailing_zeros() as usize / 10).min(BINARY.len()) };
    let suffix = steps.checked_sub(1).map_or("", |last| BINARY[last]);
    Quantity(format!("{}{suffix}", bytes >> (10 * steps)))
}

/// A plain number.
#[must_use]
pub fn number(number: u64) -> Quantity {
    Quantity(number.to_string())
}

/// The whole number that a quantity says; one with a fraction is rounded up, as Kubernetes does. None: it says none, or a negative one, or one
/// that is too large.
#[must_use]
pub fn whole(quantity: &Quantity) -> Option<u64> {
    let text = quantity.0.as_str();
    let digits = text.find(|letter: char| !letter.is_ascii_digit() && letter != '.').unwrap_or(text.len());
    let (number, suffix) = text.split_at(digits);
    let (units, fraction) = number.split_once('.').unwrap_or((number, ""));
    let places: i32 = fraction.len().try_into().ok().filter(|&places| places <= 18)?;
    // The number is `mantissa` × 10^-places × factor.
    let mantissa: u128 = format!("{units}{fraction}").parse().ok()?;
    let (factor, power) = if let Some(step) = BINARY.iter().position(|known| *known == suffix) {
        (1_u128 << (10 * (step + 1)), 0)
    } else if suffix.is_empty() {
        (1, 0)
    } else if let Some(&(_, power)) = DECIMAL.iter().find(|(known, _)| *known == suffix) {
        (1, power)
    } else {
        (1, suffix.strip_prefix(['e', 'E'])?.parse::<i8>().ok()?.into())
    };
    let product = mantissa.checked_mul(factor)?;
    let power = power - places;
    let ten = 10_u128.checked_pow(power.unsigned_abs())?;
    let whole = if power < 0 { product.div_ceil(ten) } else { product.checked_mul(ten)? };
    whole.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_are_read_as_kubernetes_reads_them() {
        for (text, expected) in [
            ("0", Some(0)),
            ("25", Some(25)),
            ("80Gi", Some(80 << 30)),
            ("1.5Gi", Some(3 << 29)),
            ("1536Mi", Some(3 << 29)),
            ("8G", Some(8_000_000_000)),
            ("2e3", Some(2000)),
            ("2E3", Some(2000)),
            ("1E", Some(1_000_000_000_000_000_000)),
            ("100m", Some(1)),
            ("2500m", Some(3)),
            ("0.0001Ki", Some(1)),
            ("-1", None),
            ("", None),
            ("Gi", None),
            ("1.2.3", None),
            ("8GB", None),
            ("16Ei", None),
            ("1e99", None),
        ] {
            assert_eq!(whole(&Quantity(text.to_owned())), expected, "{text}");
        }
    }

    #[test]
    fn quantities_are_written_as_the_api_server_writes_them() {
        for (size, expected) in [
            (0, "0"),
            (1000, "1000"),
            (64 << 20, "64Mi"),
            (80 << 30, "80Gi"),
            (3 << 29, "1536Mi"),
            (1 << 60, "1Ei"),
            ((81_559 << 20) + 512, "85520810496"),
        ] {
            assert_eq!(bytes(size).0, expected);
            assert_eq!(whole(&bytes(size)), Some(size));
        }
        assert_eq!(number(100).0, "100");
    }
}
