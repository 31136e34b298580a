// A reader of JSON for files that this project wrote: manifests and headers of tensor files.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "clef_common.hpp"

namespace clef {

// One value. Members throw Error(bundle) where it is of another kind or has no such key.
class Json {
public:
    // `where`: the file's name, for errors.
    static Json parse(std::string_view text, const std::string& where);

    const Json& at(const std::string& key) const {
        auto found = object().find(key);
        if (found == object().end()) throw Error(Kind::bundle, where_ + " has no " + key);
        return found->second;
    }
    bool has(const std::string& key) const { return object().count(key) != 0; }
    const std::map<std::string, Json>& object() const { return check('{', "object"), object_; }
    const std::vector<Json>& array() const { return check('[', "array"), array_; }
    const std::string& string() const { return check('"', "string"), text_; }
    bool is_string() const { return kind_ == '"'; }
    std::int64_t integer() const {
        check('0', "number");
        char* end = nullptr;
        long long result = std::strtoll(text_.c_str(), &end, 10);
        if (*end != '\0') throw Error(Kind::bundle, where_ + ": expected an integer, not " + text_);
        return result;
    }

private:
    struct Reader;
    char kind_ = 'n';  // { [ " 0 t f n
    std::string where_, text_;
    std::vector<Json> array_;
    std::map<std::string, Json> object_;

    void check(char kind, const char* name) const {
        if (kind_ != kind) throw Error(Kind::bundle, where_ + ": expected " + name);
    }
};

struct Json::Reader {
    std::string_view text;
    std::string where;
    std::size_t at;

    [[noreturn]] void fail(const std::string& what) const {
        throw Error(Kind::bundle, where + " cannot be read as JSON: " + what + " (byte " + std::to_string(at) + ")");
    }
    void skip_space() {
        while (at < text.size() && std::string_view(" \t\r\n").find(text[at]) != std::string_view::npos) ++at;
    }
    char next() {
        skip_space();
        if (at == text.size()) fail("it ends too early");
        return text[at];
    }
    bool took(char letter) { return next() == letter && (++at, true); }
    void need(char letter) {
        if (!took(letter)) fail(std::string("expected ") + letter);
    }

    Json value(int depth) {
        if (depth > 64) fail("it is nested too deeply");
        Json result;
        result.where_ = where;
        char first = next();
        if (first == '{' || first == '[') {
            ++at;
            result.kind_ = first;
            char last = first == '{' ? '}' : ']';
            if (took(last)) return result;
            do {
                if (first == '[') {
                    result.array_.push_back(value(depth + 1));
                    continue;
                }
                if (next() != '"') fail("expected a key");
                std::string key = quoted();
                need(':');
                result.object_.insert_or_assign(key, value(depth + 1));
            } while (took(','));
            need(last);
        } else if (first == '"') {
            result.kind_ = '"';
            result.text_ = quoted();
        } else {
            std::size_t start = at;
            while (at < text.size() && std::string_view(",]} \t\r\n").find(text[at]) == std::string_view::npos) ++at;
            result.text_ = text.substr(start, at - start);
            bool word = result.text_ == "true" || result.text_ == "false" || result.text_ == "null";
            bool number =
                result.text_.find_first_not_of("+-.0123456789eE") == std::string::npos && !result.text_.empty();
            if (!word && !number) fail("expected a value");
            result.kind_ = word ? first : '0';
        }
        return result;
    }

    std::string quoted() {
        std::string result;
        for (++at; at < text.size() && text[at] != '"'; ++at) {
            if (text[at] != '\\') {
                result += text[at];
                continue;
            }
            if (++at == text.size()) break;
            static constexpr std::string_view escaped = "\"\\/bfnrt", meant = "\"\\/\b\f\n\r\t";
            auto place = escaped.find(text[at]);
            if (place != std::string_view::npos)
                result += meant[place];
            else if (text[at] == 'u')
                append_utf8(result, code_point());
            else
                fail("an unknown escape");
        }
        if (at >= text.size()) fail("a string does not end");
        ++at;
        return result;
    }
    unsigned four_digits() {
        if (at + 4 >= text.size()) fail("an escape is cut");
        unsigned result = 0;
        for (int i = 0; i < 4; ++i) {
            char digit = text[++at];
            static constexpr std::string_view digits = "0123456789abcdef";
            auto value = digits.find(static_cast<char>(digit >= 'A' && digit <= 'F' ? digit + 32 : digit));
            if (value == std::string_view::npos) fail("an escape without four digits");
            result = 16 * result + static_cast<unsigned>(value);
        }
        return result;
    }
    unsigned code_point() {
        unsigned first = four_digits();
        if (first < 0xD800 || first > 0xDFFF) return first;
        if (first > 0xDBFF || text.substr(at + 1, 2) != "\\u") fail("an unpaired surrogate");
        at += 2;
        unsigned second = four_digits();
        if (second < 0xDC00 || second > 0xDFFF) fail("an unpaired surrogate");
        return 0x10000 + ((first - 0xD800) << 10) + (second - 0xDC00);
    }
    static void append_utf8(std::string& result, unsigned code) {
        auto put = [&](unsigned byte) { result += static_cast<char>(byte); };
        if (code < 0x80) return put(code);
        if (code < 0x800) {
            put(0xC0 | (code >> 6));
        } else {
            if (code < 0x10000) {
                put(0xE0 | (code >> 12));
            } else {
                put(0xF0 | (code >> 18));
                put(0x80 | ((code >> 12) & 0x3F));
            }
            put(0x80 | ((code >> 6) & 0x3F));
        }
        put(0x80 | (code & 0x3F));
    }
};

inline Json Json::parse(std::string_view text, const std::string& where) {
    Reader reader{text, where, 0};
    Json result = reader.value(0);
    reader.skip_space();
    if (reader.at != text.size()) reader.fail("something follows its end");
    return result;
}

}  // namespace clef
