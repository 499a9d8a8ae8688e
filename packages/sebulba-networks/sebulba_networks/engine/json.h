// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-or-later
// Reads JSON objects of numbers, texts, lists and objects: what Python has checked before.
#pragma once

#include <cstdlib>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace networks {

struct Json {
  double number = 0;
  std::string text;
  std::vector<Json> list;
  std::map<std::string, Json> fields;

  const Json& operator[](const std::string& name) const {
    const auto found = fields.find(name);
    if (found == fields.end()) throw std::runtime_error("the configuration lacks " + name);
    return found->second;
  }
  int64_t integer() const { return static_cast<int64_t>(number); }

  static Json parse(const std::string& text) {
    const char* at = text.c_str();
    return value(at);
  }

 private:
  static char next(const char*& at) {
    while (*at == ' ' || *at == '\n') ++at;
    return *at;
  }
  static void expect(const char*& at, char wanted) {
    if (next(at) != wanted) throw std::runtime_error(std::string("no JSON at: ") + at);
    ++at;
  }
  static std::string name(const char*& at) {
    expect(at, '"');
    std::string found;
    while (*at != '"' && *at != 0) found += *at++;
    expect(at, '"');
    return found;
  }
  static Json value(const char*& at) {
    Json found;
    const char first = next(at);
    if (first == '{') {
      do {
        expect(at, *at);  // the brace, or a comma
        if (next(at) == '}') break;
        const std::string key = name(at);
        expect(at, ':');
        found.fields[key] = value(at);
      } while (next(at) == ',');
      expect(at, '}');
    } else if (first == '[') {
      do {
        expect(at, *at);
        if (next(at) == ']') break;
        found.list.push_back(value(at));
      } while (next(at) == ',');
      expect(at, ']');
    } else if (first == '"') {
      found.text = name(at);
    } else {
      char* end;
      found.number = std::strtod(at, &end);
      if (end == at) throw std::runtime_error(std::string("no JSON at: ") + at);
      at = end;
    }
    return found;
  }
};

}  // namespace networks
